"""Whether recorded attention can say what a policy asks for: refused, or answered under assumptions that are named."""

from __future__ import annotations

from kvtape.planner.specs import PolicySpec
from kvtape.sim.errors import NoAttention, SimulationError
from kvtape.sim.quality.attention import AttentionMap

__all__ = ["assumed_of_scores"]


def assumed_of_scores(policy: PolicySpec, attention: AttentionMap | None, why_not: str) -> list[str]:
    """What has to be assumed for the scores that `policy` ranks by; nothing for one that ranks by none.

    Raises NoAttention without `attention` (`why_not` says why there is none), SimulationError for what no recording of
    that grain can answer. Each names the remedy.
    """
    request = policy.score_request
    if request is None:
        return []
    if attention is None:
        raise NoAttention(
            f"policy {policy.canonical} ranks by attention, and what blocks would have received that the recorded "
            f"policy gave up is not known: {why_not}"
        )
    if request.kind == "probe":
        raise SimulationError(
            f"policy {policy.canonical} ranks by a probe, and what a caller would ask is not in a log; "
            "take queries=window, or measure it on an engine with kvtape eval"
        )
    queries = max(p.n_queries for p in attention.pieces)
    keys = max(int((p.stops - p.starts).max()) for p in attention.pieces)
    _check_grain(policy, attention.session_id, queries, keys)
    said = ["scores are dense attention as recorded; an engine that has evicted shares it out among what is left"]
    if queries > 1 and request.kind != "later":
        said.append(f"attention comes in pieces of up to {queries} queries: a plan inside one does not see it yet")
    if keys > 1 and (policy.norm == "mean" or policy.split):
        said.append(f"attention is even over the tokens of a chunk of up to {keys}")
    if request.heads == "max":
        said.append("the peak over several pieces is the sum of their peaks, an upper bound")
    return said


def _check_grain(policy: PolicySpec, session_id: str, queries: int, keys: int) -> None:
    request = policy.score_request
    if request is not None and request.queries is not None and queries > request.queries:
        raise SimulationError(
            f"policy {policy.canonical} asks the last {request.queries} tokens, session {session_id} has attention of "
            f"{queries} at a time; record it with --score-all --score-every {request.queries}"
        )
    if policy.pool > 1 and keys > 1:
        raise SimulationError(
            f"policy {policy.canonical} averages over {policy.pool} neighbouring tokens, session {session_id} has "
            f"attention of {keys} at a time; leave pool out, or record with a policy of block=1"
        )
    if policy.block % keys:
        raise SimulationError(
            f"policy {policy.canonical} cuts blocks of {policy.block} tokens, session {session_id} has attention of "
            f"{keys} at a time; take a multiple of that, or record with a policy of block={policy.block}"
        )
