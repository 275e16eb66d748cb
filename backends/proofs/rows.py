"""One proof: what was measured of one subject, held against which thresholds, and what came of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

__all__ = ["KINDS", "Ability", "Bound", "Kind", "Measure", "ProofRow", "Verdict", "verdict_of"]

Kind = Literal["certification", "gate"]
Verdict = Literal["pass", "fail", "refused"]
Bound = Literal["most", "least", "equal"]
Ability = Literal["open", "quality", "capacity", "round_trip", "snapshot", "shift", "speed"]
"""What a measure speaks of. `open`: whether the engine opens it at all; `speed`: of gates."""

KINDS: tuple[Kind, ...] = ("certification", "gate")


class Measure(BaseModel):
    """One number and its verdict. `bound` says on which side of `threshold` it passes; a number without a threshold
    is told, and judged by nothing. `value` None: it could not be taken, and `reason` says why.

    `low`, `high`: ends of the 95 % interval, where there is one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ability: Ability
    name: str = Field(min_length=1)
    value: float | None = None
    unit: str = ""
    threshold: float | None = None
    bound: Bound = "equal"
    verdict: Verdict
    reason: str | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def judged(
        cls,
        ability: Ability,
        name: str,
        value: float,
        unit: str,
        *,
        most: float | None = None,
        least: float | None = None,
        equal: float | None = None,
    ) -> Measure:
        """With the verdict that follows from at most one of the bounds. A value that is no number fails."""
        if sum(limit is not None for limit in (most, least, equal)) > 1:
            raise ValueError(f"{name}: more than one bound")
        bound: Bound = "most" if most is not None else "least" if least is not None else "equal"
        limit = most if most is not None else least if least is not None else equal
        finite = math.isfinite(value)
        return cls(
            ability=ability,
            name=name,
            value=value if finite else None,
            unit=unit,
            threshold=limit,
            bound=bound,
            verdict="pass" if finite and _holds(value, bound, limit) else "fail",
            reason=None if finite else f"the value is {value}",
        )


class ProofRow(BaseModel):
    """`subject`: the knob or cell as canonical text, `k=q8_0,v=q8_0,fa=on` or `deferred-prefill`. `day`: UTC.

    `machine`: `machine_class` of a certification, `speed_class` of a gate. `settings`: what the measures depend on
    beside that, as text (the text's digest, sizes, seeds), so that two rows are compared only where they may be.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    kind: Kind
    model: str = Field(min_length=1)
    fingerprint: str = Field(min_length=1)
    engine: str = Field(min_length=1)
    engine_version: str = Field(min_length=1)
    machine: str = Field(min_length=1)
    day: str
    subject: str = Field(min_length=1)
    settings: str = ""
    verdict: Verdict
    reason: str | None = None
    measures: tuple[Measure, ...] = ()

    @field_validator("day")
    @classmethod
    def _is_a_day(cls, day: str) -> str:
        if date.fromisoformat(day).isoformat() != day:
            raise ValueError("write the day as YYYY-MM-DD")
        return day

    def ability(self, name: Ability) -> Verdict | None:
        """What came of one ability: refused, fail or pass, the worst of its measures; None where it has none."""
        return verdict_of([m for m in self.measures if m.ability == name])

    @property
    def place(self) -> tuple[str, ...]:
        """What a row is found by."""
        return (self.kind, self.fingerprint, self.engine, self.engine_version, self.machine, self.subject)


def verdict_of(measures: Sequence[Measure]) -> Verdict | None:
    """The worst verdict: a failure outweighs a refusal, a refusal a pass. None of no measures."""
    found = {m.verdict for m in measures}
    order: tuple[Verdict, ...] = ("fail", "refused", "pass")
    return next((verdict for verdict in order if verdict in found), None)


def _holds(value: float, bound: Bound, limit: float | None) -> bool:
    if limit is None:
        return True
    return {"most": value <= limit, "least": value >= limit, "equal": value == limit}[bound]
