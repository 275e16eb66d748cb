"""From measures to the verdict of a row: what must pass, what only takes abilities away.

A row passes when nothing of `open`, `quality` and `capacity` failed or was refused. The other abilities each stand for
a capability, which a session does without where theirs did not pass (`backends.proofs.check`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.proofs.check import CORE
from kvtape.backends.proofs.rows import Measure, Verdict, verdict_of

__all__ = ["Outcome", "outcome_of"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """`reason`: which measures decided, unless all passed."""

    verdict: Verdict
    reason: str | None


def outcome_of(measures: Sequence[Measure]) -> Outcome:
    """Raises ValueError where a core ability was not measured: silence is no pass."""
    missing = [ability for ability in CORE if all(m.ability != ability for m in measures)]
    opened = [m for m in measures if m.ability == "open"]
    if opened and any(m.verdict != "pass" for m in opened):
        return Outcome("refused", _told(opened))
    if missing:
        raise ValueError(f"not measured: {', '.join(missing)}")
    core = [m for m in measures if m.ability in CORE]
    verdict = verdict_of(core)
    return Outcome("pass", None) if verdict == "pass" else Outcome("fail", _told(core))


def _told(measures: Sequence[Measure]) -> str:
    return "; ".join(_one(m) for m in measures if m.verdict != "pass")


def _one(measure: Measure) -> str:
    if measure.reason is not None:
        return measure.reason
    return f"{measure.ability} {measure.name} {measure.value:.4g} {measure.unit}, {measure.bound} {measure.threshold:g}"
