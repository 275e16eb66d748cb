"""What a recorded session is modelled as, and what has to be assumed where the log or the question leaves it open."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from kvtape.backends.modelled.shape import Shape
from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.capacity.fingerprint import fingerprint_difference
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.residency_state import UNBOUNDED
from kvtape.planner.rows import SessionRow
from kvtape.planner.specs import PolicySpec, parse_policy
from kvtape.sim.costs.model import CostTable
from kvtape.sim.errors import CostsError, SimulationError, WorkloadError
from kvtape.sim.quality.answerable import assumed_of_scores
from kvtape.sim.world.script import Script
from kvtape.sim.world.settings import Settings

__all__ = ["Modelled", "check_costs", "model_session"]

_ALL = Capabilities(
    remove_tail=True,
    remove_middle=True,
    position_shift=True,
    cold_store=True,
    recompute_range=True,
    snapshot_state=True,
)
_CHUNK = 512


@dataclass(frozen=True, slots=True)
class Modelled:
    """`repeat`: the recorded policy on the recorded context, so that what callers asked for by name is repeated."""

    shape: Shape
    policy: PolicySpec
    repeat: bool
    assumed: tuple[str, ...]


def check_costs(costs: CostTable, row: SessionRow) -> None:
    """Raises CostsError for costs of another model, engine or configuration than the session's."""
    origin = costs.origin
    if origin.hypothetical or row.model_fingerprint is None:
        return
    if origin.model_fingerprint is not None:
        why = fingerprint_difference(origin.model_fingerprint, row.model_fingerprint)
        if why:
            raise CostsError(
                f"the costs are of {origin.model_name}, session {row.session_id} ran {row.model_name}: "
                f"different {', '.join(why)}; calibrate on a log of that model"
            )
    for name, mine, its in (
        ("engine", origin.backend, row.backend),
        ("threads", origin.threads, row.threads),
        ("kv_type_k", origin.kv_type_k, row.kv_type_k),
        ("kv_type_v", origin.kv_type_v, row.kv_type_v),
    ):
        if mine != its:
            raise CostsError(
                f"the costs are of {name} {mine}, session {row.session_id} has {its}; calibrate on a log like it"
            )


def model_session(script: Script, settings: Settings, costs: CostTable, n_ctx_train: int | None) -> Modelled:
    """Raises SimulationError where the log leaves open what only the caller can say, SpecError for a bad policy."""
    row, assumed = script.row, list[str]()
    n_ctx = settings.n_ctx or row.n_ctx
    if n_ctx is None:
        remedy = "give --n-ctx (whatif and tune: --budget)"
        raise SimulationError(f"session {row.session_id}: the log names no context; {remedy}")
    text = settings.policy or row.policy
    if text is None:
        raise SimulationError(f"session {row.session_id}: the log names no policy; give --policy")
    policy = _policy(text, settings)
    assumed += assumed_of_scores(policy, script.attention, script.no_attention)
    recorded = None if row.policy is None else parse_policy(row.policy)
    cold = row.cold_budget_tokens or 0 if settings.cold_tokens is None else settings.cold_tokens
    can, said = _capabilities(row, cold)
    can = replace(can, attention_scores=policy.score_request is not None)
    assumed += said
    if row.chunk is None:
        assumed.append(f"prefill in pieces of {_CHUNK} tokens")
    if n_ctx_train is None:
        assumed.append("no trained context: positions run on without a compaction")
    config = SessionConfig(
        n_ctx=row.n_ctx_asked or n_ctx,
        chunk=row.chunk or _CHUNK,
        kv_type_k=row.kv_type_k or "f16",
        kv_type_v=row.kv_type_v or "f16",
        flash_attention="on" if row.flash_attention else "off",
        threads=row.threads or 1,
        cold_budget_tokens=cold,
        cold_budget_bytes=(row.cold_budget_bytes or 0) if cold else 0,
    )
    name, vocab = row.model_name or "unknown", max(1, script.n_vocab)
    facts = ModelFacts(
        name, row.model_fingerprint or "unknown", "unknown", vocab, n_ctx_train or UNBOUNDED, frozenset()
    )
    shape = Shape(facts, config, n_ctx, can, costs.origin.row_bytes, row.backend)
    same = recorded is not None and policy == recorded and n_ctx == row.n_ctx and cold == (row.cold_budget_tokens or 0)
    return Modelled(shape, policy, same, tuple(assumed))


def _policy(text: str, settings: Settings) -> PolicySpec:
    policy = parse_policy(text)
    return policy if settings.block is None else replace(policy, block=settings.block)


def _capabilities(row: SessionRow, cold: int) -> tuple[Capabilities, list[str]]:
    if row.capabilities is None:
        return replace(_ALL, cold_store=cold > 0), ["an engine that can do all but score attention"]
    try:
        can = Capabilities(**json.loads(row.capabilities))
    except (TypeError, ValueError):
        raise WorkloadError(
            f"session {row.session_id}: its capabilities are not readable"
            "; kvtape verify LOG says whether it was changed"
        ) from None
    had = bool(row.cold_budget_tokens)
    if cold and not had:
        able = can.remove_middle and can.snapshot_state
        return replace(can, cold_store=able), ["a cold store, where the recorded session had none"] if able else []
    return replace(can, cold_store=can.cold_store and cold > 0), []
