"""What a cell came to, as a row of the store of proofs."""

from __future__ import annotations

from pathlib import Path

from kvtape.backends.proofs.machine import speed_class
from kvtape.backends.proofs.rows import Measure, ProofRow, Verdict
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.eval.gate.cells import Cell
from kvtape.eval.gate.effect import Effect
from kvtape.eval.gate.smoke import LIMITS
from kvtape.eval.gate.verdict import Outcome

__all__ = ["SAVED", "gate_proof", "refused_proof"]

SAVED = {"cpu": "cpu_time_saved", "wall": "wall_time_saved"}
"""Name of the measure that holds each clock's effect."""


def gate_proof(
    cell: Cell, engine: Engine, config: SessionConfig, outcome: Outcome, *, day: str, settings: str
) -> ProofRow:
    """`config`: the effective one; `day`: UTC, YYYY-MM-DD.

    The effect that decides has the margin as its threshold, which the low end of its interval is held to.
    """
    smoke = outcome.smoke
    measures = (
        Measure.judged("quality", "parted_turns", outcome.parted, "turns", equal=0),
        Measure.judged("quality", "parted_in_smoke", smoke.parted, "conversations", equal=0),
        Measure.judged("quality", "checkpoints", smoke.checkpoints, "", least=1),
        Measure.judged("quality", "kl", smoke.kl, "nats", most=LIMITS["kl"]),
        Measure.judged("quality", "nll_delta", abs(smoke.nll_delta), "nats", most=LIMITS["nll_delta"]),
        Measure.judged("quality", "top1", smoke.top1, "share", least=LIMITS["top1"]),
        Measure.judged("quality", "used_in_smoke", smoke.used, "times", least=1),
        Measure.judged("speed", "used", outcome.used, "times", least=1),
        Measure.judged("speed", "conversations", outcome.cpu.conversations, ""),
        Measure.judged("speed", "turns", outcome.turns, ""),
        *(_saved(by, effect, outcome) for by, effect in (("cpu", outcome.cpu), ("wall", outcome.wall))),
    )
    verdict: Verdict = "pass" if outcome.through else "fail"
    return _row(cell, engine, config, day, settings, verdict, outcome.reason, measures)


def refused_proof(
    cell: Cell, engine: Engine, config: SessionConfig, reason: str, *, day: str, settings: str
) -> ProofRow:
    """For what the engine or a session refuses to open: the optimisation is not possible here."""
    return _row(cell, engine, config, day, settings, "refused", reason)


def _saved(by: str, effect: Effect, outcome: Outcome) -> Measure:
    """The interval's low end is held to the margin where this clock decides; the other one may only not be a loss."""
    known = effect.low == effect.low
    good = effect.beyond(outcome.margin) if by == outcome.decided_by else not effect.is_loss
    return Measure(
        ability="speed",
        name=SAVED[by],
        value=effect.saved,
        unit="share",
        threshold=outcome.margin if by == outcome.decided_by else None,
        bound="least",
        verdict="pass" if good else "fail",
        low=effect.low if known else None,
        high=effect.high if known else None,
    )


def _row(
    cell: Cell,
    engine: Engine,
    config: SessionConfig,
    day: str,
    settings: str,
    verdict: Verdict,
    reason: str,
    measures: tuple[Measure, ...] = (),
) -> ProofRow:
    return ProofRow(
        kind="gate",
        model=Path(engine.facts.path).name,
        fingerprint=engine.facts.fingerprint,
        engine=engine.name,
        engine_version=engine.version,
        machine=speed_class(),
        day=day,
        subject=cell.subject(engine.name, config),
        settings=settings,
        verdict=verdict,
        reason=reason,
        measures=measures,
    )
