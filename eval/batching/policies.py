"""kvtape's policies at the rows of a native eviction: what a spec leaves open is filled in from the comparator's.

Both protect the same beginning and the same recent tokens, and evict whole blocks of the same size when the same number
of rows would be passed. So both hold equally many rows at every token, which the comparison checks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvtape.backends.batching.config import BLOCK, Eviction
from kvtape.backends.errors import UsageError
from kvtape.eval.candidates import Candidate
from kvtape.planner.policy_options import OPTIONS
from kvtape.planner.specs import POLICY_NAMES, Spec, choose_name, parse_policy, parse_spec, policy_with

__all__ = ["DEFAULT_POLICIES", "DENSE", "policies_beside"]

DEFAULT_POLICIES = ("stream", "h2o", "snapkv")

DENSE = Candidate(parse_policy(f"none:block={BLOCK}"), None)


def policies_beside(eviction: Eviction, texts: Sequence[str], seed: int = 0) -> list[Candidate]:
    """Each policy of `texts`, once, with what it does not say itself taken from `eviction`; `seed` is for `random`.

    Raises SpecError for a bad spec, UsageError for one of blocks of another size or that never evicts.
    """
    found: dict[str, Candidate] = {}
    for text in texts:
        spec = parse_spec(text)
        policy = policy_with(spec, _defaults(spec, eviction, seed) | dict(spec.args))
        if not policy.evicts:
            raise UsageError(f"policy {text} never evicts; dense attention is always there, name one that does")
        if policy.block != BLOCK:
            raise UsageError(
                f"policy {text}: blocks of {policy.block} tokens beside the comparator's of {BLOCK}; give block={BLOCK}"
            )
        budget = policy.sink + policy.recent if policy.budget is None else policy.budget
        found.setdefault(policy.canonical, Candidate(policy, budget))
    return list(found.values())


def _defaults(spec: Spec, eviction: Eviction, seed: int) -> dict[str, str]:
    protected = {"sink": eviction.start, "recent": eviction.recent}
    if spec.target is not None:
        return {key: str(value) for key, value in {**protected, "budget": eviction.peak}.items()}
    name = choose_name("policy", spec.name, POLICY_NAMES)
    if name == "stream":
        recent = eviction.peak - BLOCK - eviction.start
        return {"sink": str(eviction.start), "recent": str(recent), "split": "no"}
    filled = {**protected, "budget": eviction.peak, "seed": seed}
    if name == "snapkv" and dict(spec.args).get("queries") != "probe":
        filled["window"] = eviction.window or eviction.recent
    return {key: str(value) for key, value in filled.items() if key in OPTIONS[name]}
