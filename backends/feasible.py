"""Can this policy run on this backend at all? Asked before anything is written, and again when the policy changes."""

from __future__ import annotations

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.protocol import Backend, Clairvoyant
from kvtape.planner.events import Way
from kvtape.planner.specs import PolicySpec

__all__ = ["check_policy", "may_recompute", "require_clairvoyant"]


def may_recompute(backend: Backend, evict_by: str, allowed: bool | None = None) -> bool:
    """Whether evicts may be carried out by rebuilding; not said, a cold store or `evict_by="recompute"` allows it.

    Raises UsageError for an `evict_by` that is neither native nor recompute.
    """
    if evict_by not in ("native", "recompute"):
        raise UsageError(f"evict_by {evict_by!r}: choose native or recompute")
    return backend.config.cold_budget_tokens > 0 or evict_by == "recompute" if allowed is None else allowed


def check_policy(
    policy: PolicySpec, backend: Backend, *, evict_by: str = "native", allow_recompute: bool | None = None
) -> None:
    """Raises SpecError for spans that do not fit the context, UnsupportedOperation for a way that is not there.

    What was asked for by name must be there; a policy that leaves the way open may find none and say so.
    """
    policy.check_context(backend.n_ctx)
    ways = policy.ways(backend.capabilities, may_recompute(backend, evict_by, allow_recompute))
    if not policy.evicts:
        return
    if policy.score_request is not None and policy.score_request.kind == "later":
        require_clairvoyant(backend)
    if policy.positions == "rebased" and not ways:
        why = backend.refusal("position_shift") or backend.refusal("remove_middle") or "no way to carry it out"
        raise UnsupportedOperation(f"positions=rebased on {backend.name}", why)
    if evict_by == "recompute" and Way.RECOMPUTE not in ways:
        why = backend.refusal("recompute_range") or "allow_recompute is off"
        raise UnsupportedOperation(f"evicting by recompute on {backend.name}", why)


def require_clairvoyant(backend: Backend) -> Clairvoyant:
    """`backend`, if what is still to come is known to it. Raises UnsupportedOperation where it is not."""
    if not isinstance(backend, Clairvoyant):
        raise UnsupportedOperation(
            f"policy opt on {backend.name}",
            "it knows what later tokens attend to, which only a recording does: kvtape simulate, kvtape whatif",
        )
    return backend
