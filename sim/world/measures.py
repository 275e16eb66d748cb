"""What a simulated run came to: one row a turn, and the figures over all turns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from kvtape.backends.sinks import WatchingSink
from kvtape.planner.events import Event, Op
from kvtape.planner.rows import SessionRow
from kvtape.sim.nearest_rank import MEDIAN, P95, nearest_rank
from kvtape.sim.quality.meter import TurnMass, over_turns

__all__ = ["Counter", "TurnResult", "summary"]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Times in ns on the simulated clock. `queued_ns` of the wait for a slot and for the turn before.

    `outcome`: served, cut_short (fewer tokens than the log has), refused (`why`), or unserved. `mass`: what its queries
    found resident of what they attended to; None where that was not recorded. `lost_turns`: how often it had begun on a
    slot that failed; its times but `arrived_ns` are those of the last time.
    """

    session_id: str
    turn: int
    arrived_ns: int
    began_ns: int
    prompted_ns: int
    ended_ns: int
    decode_ns: int
    generated: int
    outcome: str
    why: str | None = None
    mass: TurnMass | None = None
    lost_turns: int = 0

    @property
    def queued_ns(self) -> int:
        return self.began_ns - self.arrived_ns

    @property
    def ttft_ns(self) -> int:
        return self.prompted_ns - self.arrived_ns

    @property
    def latency_ns(self) -> int:
        return self.ended_ns - self.arrived_ns


@dataclass
class Counter(WatchingSink):
    """An `EventSink` that counts what an operator pays for. Tokens, unless a name says otherwise."""

    events: int = 0
    prefilled: int = 0
    recomputed: int = 0
    reused: int = 0
    forgotten: int = 0
    evicted: int = 0
    admitted: int = 0
    generated: int = 0
    peak_bytes: int = 0
    refused: int = 0
    _bytes: dict[str, int] = field(default_factory=dict)
    _total: int = 0

    def open_session(self, row: SessionRow) -> None:
        self._note(row.session_id, 0)

    def see(self, event: Event) -> None:
        n, op = event.n_tokens or 0, event.op
        self.events += 1
        self.reused += event.reused or 0
        self.forgotten += event.forgotten or 0
        self.recomputed += event.recomputed_tokens or 0
        self.prefilled += n if op == Op.PREFILL else 0
        self.evicted += n if op == Op.EVICT else 0
        self.admitted += n if op == Op.ADMIT else 0
        self.generated += n if op == Op.DECODE else 0
        self.refused += op == Op.REFUSE
        if event.kv_bytes is not None:
            self._note(event.session_id, event.kv_bytes)
        if op == Op.CLOSE:
            self._note(event.session_id, 0)

    def _note(self, session_id: str, n_bytes: int) -> None:
        self._total += n_bytes - self._bytes.get(session_id, 0)
        self._bytes[session_id] = n_bytes
        self.peak_bytes = max(self.peak_bytes, self._total)

    def flush(self) -> int:
        return self.events


def summary(turns: Sequence[TurnResult], counter: Counter, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Figures over all turns; a figure that nothing was measured for is None."""
    done = [t for t in turns if t.outcome in ("served", "cut_short")]
    spoke = [t for t in done if t.generated]
    outcomes = [t.outcome for t in turns]
    return {
        "turns": len(turns),
        "served": outcomes.count("served"),
        "cut_short": outcomes.count("cut_short"),
        "refused": outcomes.count("refused"),
        "unserved": outcomes.count("unserved"),
        "ttft_p50_ns": _rank(MEDIAN, (t.ttft_ns for t in done)),
        "ttft_p95_ns": _rank(P95, (t.ttft_ns for t in done)),
        "tpot_p50_ns": _rank(MEDIAN, (t.decode_ns // t.generated for t in spoke)),
        "tpot_p95_ns": _rank(P95, (t.decode_ns // t.generated for t in spoke)),
        "latency_p50_ns": _rank(MEDIAN, (t.latency_ns for t in done)),
        "latency_p95_ns": _rank(P95, (t.latency_ns for t in done)),
        "queued_p95_ns": _rank(P95, (t.queued_ns for t in done)),
        "end_ns": max((t.ended_ns for t in turns), default=0),
        "peak_kv_bytes": counter.peak_bytes,
        "prefilled_tokens": counter.prefilled,
        "reused_tokens": counter.reused,
        "forgotten_tokens": counter.forgotten,
        "recomputed_tokens": counter.recomputed,
        "evicted_tokens": counter.evicted,
        "admitted_tokens": counter.admitted,
        "generated_tokens": counter.generated,
        "refusals": counter.refused,
        "events": counter.events,
        **over_turns([t.mass for t in done]),
        **extra,
    }


def _rank(share: Fraction, values: Iterable[int]) -> int | None:
    ordered = sorted(values)
    return ordered[nearest_rank(share, len(ordered))] if ordered else None
