"""What is compared: policies with their budgets. A spec that names no budget gets each of the evaluation's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.errors import UsageError
from kvtape.planner.grammar import Spec
from kvtape.planner.policy_options import OPTIONS
from kvtape.planner.specs import PolicySpec, parse_policy, parse_spec

__all__ = ["DEFAULT_SINK", "Candidate", "candidates_of"]

DEFAULT_SINK = 4
"""Sink tokens of `stream` when its spec names none: what Xiao et al. 2023 keep."""

_SEED = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy at a budget in tokens; None keeps everything. `draws_by_trial`: `random` without a seed of its own,
    which then draws with the seed of each trial."""

    policy: PolicySpec
    budget: int | None
    draws_by_trial: bool = False

    @property
    def label(self) -> str:
        """The policy's canonical text; without a seed where each trial has its own."""
        text = self.policy.canonical
        return text.replace(f"seed={_SEED}", "seed=trial") if self.draws_by_trial else text

    def policy_of(self, seed: int) -> PolicySpec:
        """The policy of the trial with this seed."""
        if not self.draws_by_trial:
            return self.policy
        return parse_policy(self.policy.canonical.replace(f"seed={_SEED}", f"seed={seed}"))

    @property
    def wants_scores(self) -> bool:
        return self.policy.score_request is not None


def candidates_of(texts: Sequence[str], budgets: Sequence[int]) -> list[Candidate]:
    """Dense first (policy `none`, always there), then the others in the order given, each once.

    `stream` without `recent` keeps budget - sink recent tokens. Raises SpecError for a bad spec, UsageError for one
    that has no budget and gets none.
    """
    found = {"none": Candidate(parse_policy("none"), None)}
    for text in texts:
        spec = parse_spec(text)
        for candidate in _with_budgets(text, spec, budgets):
            if candidate.policy.evicts:
                found.setdefault(candidate.label, candidate)
    blocks = sorted({c.policy.block for c in found.values() if c.policy.evicts})
    if len(blocks) > 1:
        raise UsageError(
            f"policies with block={' and block='.join(map(str, blocks))}: one evaluation cuts blocks of one size"
        )
    if blocks:
        found["none"] = Candidate(parse_policy(f"none:block={blocks[0]}"), None)
    return list(found.values())


def _with_budgets(text: str, spec: Spec, budgets: Sequence[int]) -> list[Candidate]:
    given = dict(spec.args)
    if spec.name == "none" and spec.target is None:
        return [Candidate(parse_policy(text), None)]
    own = _own_budget(spec, given)
    if own is not None:
        return [_candidate(text, spec, given, own)]
    if not budgets:
        raise UsageError(f"policy {text}: names no budget; give one in the spec or with --budget")
    return [_candidate(text, spec, given, budget) for budget in budgets]


def _own_budget(spec: Spec, given: dict[str, str]) -> int | None:
    """The budget that the text itself names; None when it names none."""
    if spec.name == "stream" and spec.target is None:
        if "recent" not in given:
            return None
        policy = parse_policy(
            str(Spec(spec.name, (*spec.args, *(() if "sink" in given else (("sink", str(DEFAULT_SINK)),)))))
        )
        return policy.sink + policy.recent
    return parse_policy(_completed(spec, given, None)).budget if "budget" in given else None


def _candidate(text: str, spec: Spec, given: dict[str, str], budget: int) -> Candidate:
    by_trial = spec.name == "random" and spec.target is None and "seed" not in given
    policy = parse_policy(_completed(spec, given, budget))
    return Candidate(policy, budget, by_trial)


def _completed(spec: Spec, given: dict[str, str], budget: int | None) -> str:
    """The spec with what the evaluation adds: a budget, the spans of `stream`, a seed for `random`."""
    added = dict(given)
    if spec.name == "stream" and spec.target is None:
        sink = added.setdefault("sink", str(DEFAULT_SINK))
        if "recent" not in added and budget is not None and sink.isdecimal():
            if budget <= int(sink):
                raise UsageError(f"policy {spec}: a budget of {budget} leaves nothing recent beside sink={sink}")
            added["recent"] = str(budget - int(sink))
    elif budget is not None:
        added.setdefault("budget", str(budget))
    if spec.name == "random" and spec.target is None:
        added.setdefault("seed", str(_SEED))
    if spec.target is None and spec.name not in OPTIONS:
        parse_policy(str(spec))
    return str(Spec(spec.name, tuple(added.items()), spec.target))
