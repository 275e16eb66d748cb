"""What is compared: policies with their budgets. A spec that names no budget gets each of the evaluation's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvtape.backends.errors import UsageError
from kvtape.planner.grammar import Spec, choose_name
from kvtape.planner.specs import DEFAULT_SINK, POLICY_NAMES, PolicySpec, parse_policy, parse_spec, policy_with

__all__ = ["Candidate", "candidates_of"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A policy at a budget in tokens; None keeps everything. `draws_by_trial`: `random` without a seed of its own,
    which then draws with the seed of each trial."""

    policy: PolicySpec
    budget: int | None
    draws_by_trial: bool = False

    @property
    def label(self) -> str:
        """The policy's canonical text; where each trial has a seed of its own it says so."""
        text = self.policy.canonical
        return text.replace(f"seed={self.policy.seed}", "seed=trial") if self.draws_by_trial else text

    def policy_of(self, seed: int) -> PolicySpec:
        """The policy of the trial with this seed."""
        return replace(self.policy, seed=seed) if self.draws_by_trial else self.policy

    def settled(self, seed: int) -> Candidate:
        """Where there is one trial only: the policy with that trial's seed."""
        return Candidate(self.policy_of(seed), self.budget)

    @property
    def wants_scores(self) -> bool:
        return self.policy.score_request is not None


def candidates_of(texts: Sequence[str], budgets: Sequence[int]) -> list[Candidate]:
    """Dense first (policy `none`, always there), then the others in the order given, each once.

    `stream` without `recent` keeps budget - sink recent tokens. Raises SpecError for a bad spec, UsageError for one
    that has no budget and gets none, and for policies that cut blocks of different sizes.
    """
    found: dict[str, Candidate] = {}
    for text in texts:
        for candidate in _with_budgets(text, budgets):
            if candidate.policy.evicts:
                found.setdefault(candidate.label, candidate)
    blocks = sorted({c.policy.block for c in found.values()})
    if len(blocks) > 1:
        sizes = " and ".join(f"block={b}" for b in blocks)
        raise UsageError(
            f"policies with {sizes}: one evaluation cuts blocks of one size; give all policies the same block="
        )
    dense = f"none:block={blocks[0]}" if blocks else "none"
    return [Candidate(parse_policy(dense), None), *found.values()]


def _with_budgets(text: str, budgets: Sequence[int]) -> list[Candidate]:
    spec = parse_spec(text)
    own = spec.target is None  # not a user's function
    if own and choose_name("policy", spec.name, POLICY_NAMES) == "none":
        return [Candidate(parse_policy(text), None)]
    given = dict(spec.args)
    by_trial = own and spec.name == "random" and "seed" not in given
    if by_trial:
        given["seed"] = "0"
    if own and spec.name == "stream":
        given.setdefault("sink", str(DEFAULT_SINK))
        if "recent" not in given:
            sink = policy_with(spec, given | {"recent": "1"}).sink
            return [_stream(text, spec, given, sink, budget) for budget in _needed(text, budgets)]
        policy = policy_with(spec, given)
        return [Candidate(policy, policy.sink + policy.recent)]
    if "budget" in given:
        policies = [policy_with(spec, given)]
    else:
        policies = [policy_with(spec, given | {"budget": str(budget)}) for budget in _needed(text, budgets)]
    return [Candidate(policy, policy.budget, by_trial) for policy in policies]


def _needed(text: str, budgets: Sequence[int]) -> Sequence[int]:
    if not budgets:
        raise UsageError(f"policy {text}: names no budget; give one in the spec or with --budget")
    return budgets


def _stream(text: str, spec: Spec, given: dict[str, str], sink: int, budget: int) -> Candidate:
    if budget <= sink:
        raise UsageError(
            f"policy {text}: a budget of {budget} leaves nothing recent beside sink={sink}"
            "; raise the budget or lower sink"
        )
    return Candidate(policy_with(spec, given | {"recent": str(budget - sink)}), budget)
