"""Can this policy run on this backend at all, and may this precision be used?

Asked before anything is written, and of the policy again when it changes.
"""

from __future__ import annotations

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.proofs.knobs import BASE, Precision, precision_subject
from kvtape.backends.protocol import Backend, Clairvoyant
from kvtape.planner.events import Way
from kvtape.planner.specs import PolicySpec

__all__ = ["check_policy", "check_precision", "may_recompute", "require_clairvoyant"]


def may_recompute(backend: Backend, evict_by: str, allowed: bool | None = None) -> bool:
    """Whether evicts may be carried out by rebuilding; not said, a cold store or `evict_by="recompute"` allows it.

    Raises UsageError for an `evict_by` that is neither native nor recompute.
    """
    if evict_by not in ("native", "recompute"):
        raise UsageError(f"evict_by {evict_by!r}: choose native or recompute")
    return backend.config.cold_budget_tokens > 0 or evict_by == "recompute" if allowed is None else allowed


def check_precision(backend: Backend) -> Precision:
    """What is known of the precision that `backend` was opened with.

    Raises UsageError, with the command that certifies it, for one that no passing row advertises, unless its
    configuration says `uncertified`.
    """
    if precision_subject(backend.name, backend.config) is None:
        return BASE
    # Base precisions, which are nearly all, need no document read and no pydantic.
    from kvtape.backends.proofs.check import precision_of, precision_problem
    from kvtape.backends.proofs.store import open_proofs

    asked = (backend.name, backend.engine_version, backend.facts, backend.config, open_proofs())
    problem = None if backend.config.uncertified else precision_problem(*asked)
    if problem is not None:
        raise UsageError(problem)
    return precision_of(*asked)


def check_policy(
    policy: PolicySpec,
    backend: Backend,
    *,
    evict_by: str = "native",
    allow_recompute: bool | None = None,
    precision: Precision = BASE,
) -> None:
    """Raises SpecError for spans that do not fit the context, UnsupportedOperation for a way that is not there.

    What was asked for by name must be there; a policy that leaves the way open may find none and say so.
    `precision`: what `check_precision` said, where it was asked.
    """
    policy.check_context(backend.n_ctx)
    ways = policy.ways(precision.left_of(backend.capabilities), may_recompute(backend, evict_by, allow_recompute))
    if not policy.evicts:
        return
    if policy.score_request is not None and policy.score_request.kind == "later":
        require_clairvoyant(backend)
    if policy.positions == "rebased" and not ways:
        why = (
            precision.withheld.get("position_shift")
            or backend.refusal("position_shift")
            or backend.refusal("remove_middle")
            or "no way to carry it out"
        )
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
