"""What a replay found, as data: the same log and the same engines give the same bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvtape.replay.findings import Gate, Tolerances
from kvtape.replay.numbers import Agreement, merge
from kvtape.replay.story import Divergence

__all__ = ["BackendReport", "ReplayReport", "SessionReport"]


@dataclass(frozen=True, slots=True)
class SessionReport:
    """One recorded session: its events, how many of them fold, whether events were lost, each backend's numbers.

    `roundings`: what rounding alone does to the reference, where the gate had to know.
    """

    session: str
    events: int
    foldable: int
    lost_at: int | None
    agreements: dict[str, Agreement | None]
    roundings: dict[str, Agreement | None]

    def to_json(self) -> dict[str, Any]:
        numbers = {name: _agreement(a) for name, a in self.agreements.items()}
        for name, rounding in self.roundings.items():
            if rounding is not None:
                numbers[name]["rounding"] = _agreement(rounding)
        return {
            "session": self.session,
            "events": self.events,
            "foldable": self.foldable,
            "lost_at": self.lost_at,
            "numbers": numbers,
        }


@dataclass(frozen=True, slots=True)
class BackendReport:
    """One target over all sessions. Rows are counted once per look; `residency_events` are those executed.

    `agreements`: one a session, None where it has no checkpoint; `roundings`: of the reference with itself, rounded,
    where the gate had to know. `reference` is None for a model that the numpy code
    does not cover; `reference_reason` says why.
    """

    name: str
    way: str
    engine_version: str
    kv_types: str
    events_compared: int
    residency_events: int
    witness_positions: int
    witness_rows: int
    witness_identities: int
    witness_unclear: int
    not_executed: int
    agreements: tuple[Agreement | None, ...]
    roundings: tuple[Agreement | None, ...]
    reference: str | None
    reference_reason: str | None
    tolerances: Tolerances
    diverged: bool

    @property
    def agreement(self) -> Agreement | None:
        """Over the checkpoints of all sessions."""
        return merge(self.agreements)

    @property
    def residency_equal(self) -> bool:
        """Whether nothing diverged and the memory was read after every event that changed what is resident."""
        return not self.diverged and self.witness_positions == self.residency_events

    def equal(self, gate: Gate) -> bool:
        """Whether the same tokens were resident, every row of them known by its key, and each session's numbers pass.

        A model that the numpy code does not cover has no row identified, so it is never equal.
        """
        identified = self.reference is not None and self.witness_identities == self.witness_rows
        numbers = zip(self.agreements, self.roundings, strict=True)
        return self.residency_equal and identified and all(gate.passes(*both) for both in numbers)

    def to_json(self, gate: Gate) -> dict[str, Any]:
        known = [a for a in self.agreements if a is not None]
        return {
            "name": self.name,
            "way": self.way,
            "engine_version": self.engine_version,
            "kv_types": self.kv_types,
            "equal": self.equal(gate),
            "residency_equal": self.residency_equal,
            "events_compared": self.events_compared,
            "residency_events": self.residency_events,
            "witness_positions": self.witness_positions,
            "witness_rows": self.witness_rows,
            "witness_identities": self.witness_identities,
            "witness_unclear": self.witness_unclear,
            "not_executed": self.not_executed,
            **_agreement(self.agreement),
            "worst_session_mean_kl": _number(max(a.mean_kl for a in known)) if known else None,
            "worst_session_top1": min((a.top1 for a in known), default=None),
            "reference": self.reference,
            "reference_reason": self.reference_reason,
            "tolerances": {
                "identity": self.tolerances.identity,
                "moved_key": self.tolerances.moved_key,
                "rounding": self.tolerances.rounding,
            },
        }


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """`equal` speaks for all backends; `first_divergence` is the earliest by session and seq."""

    config_digest: str
    seed: int | None
    log_digest: str
    model: str
    first_divergence: Divergence | None
    backends: tuple[BackendReport, ...]
    sessions: tuple[SessionReport, ...]
    notes: tuple[str, ...]
    gate: Gate

    @property
    def equal(self) -> bool:
        return self.first_divergence is None and all(b.equal(self.gate) for b in self.backends)

    def to_json(self) -> dict[str, Any]:
        """Plain values with stable keys; no times, no paths."""
        return {
            "equal": self.equal,
            "first_divergence": self.first_divergence.to_json() if self.first_divergence else None,
            "backends": [b.to_json(self.gate) for b in self.backends],
            "sessions": [s.to_json() for s in self.sessions],
            "notes": list(self.notes),
            "config_digest": self.config_digest,
            "seed": self.seed,
            "log_digest": self.log_digest,
            "model_fingerprint": self.model,
            "tolerances": {
                "mean_kl": self.gate.mean_kl,
                "top1": self.gate.top1,
                "noise_floor_mean_kl": self.gate.noise_floor_mean_kl,
                "rounding_times": self.gate.rounding_times,
                "rounding_deviations": self.gate.rounding_deviations,
            },
        }


def _agreement(a: Agreement | None) -> dict[str, Any]:
    if a is None:
        return {"checkpoints": 0, "max_kl": None, "mean_kl": None, "top1": None}
    return {"checkpoints": a.checkpoints, "max_kl": _number(a.max_kl), "mean_kl": _number(a.mean_kl), "top1": a.top1}


def _number(value: float) -> float | None:
    """JSON has no infinity; logits that are not numbers leave a null beside a failed gate."""
    return value if math.isfinite(value) else None
