"""A recorded session as it is replayed: its events with their tokens and the fold after each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import UsageError
from kvtape.planner.events import Event, Op
from kvtape.planner.residency import IllegalEvent, ResidencyMismatch, ResidencyState, apply, check_event
from kvtape.planner.rows import SessionRow, TokensRow
from kvtape.replay.findings import Finding

__all__ = ["Divergence", "Story", "read_story"]

_CONTEXT_EVENTS = 5
_CONTEXT_FIELDS = ("seq", "op", "start", "stop", "cache_start", "delta", "way", "block_id", "snapshot_id", "reason")


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first thing that differs: where, on which backend (`log`: the log contradicts itself), what."""

    session: str
    seq: int
    op: str
    backend: str
    finding: Finding
    context: tuple[dict[str, Any], ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "session": self.session,
            "seq": self.seq,
            "op": self.op,
            "backend": self.backend,
            "what": self.finding.what,
            "expected": _lists(self.finding.expected),
            "found": _lists(self.finding.found),
            "context": [dict(entry) for entry in self.context],
        }


@dataclass(frozen=True, slots=True)
class Story:
    """`states[i]` is the fold after `events[i]`; events end where the log itself diverges or lost events begin.

    `n_events`: how many the log has. `surrogate`: its tokens were drawn, for the log has no content.
    """

    row: SessionRow
    n_events: int
    events: tuple[Event, ...]
    states: tuple[ResidencyState, ...]
    tokens: Mapping[int, tuple[int, ...]]
    divergence: Divergence | None
    lost_at: int | None
    surrogate: bool = False

    @property
    def session_id(self) -> str:
        return self.row.session_id

    def peaks(self) -> tuple[int, int]:
        """The most tokens that were resident at once, and the most that were cold."""
        resident = max((s.resident_tokens for s in self.states), default=0)
        return resident, max((s.cold_ranges.n_tokens for s in self.states), default=0)

    def distinct_tokens(self) -> npt.NDArray[np.int64]:
        parts = [np.asarray(row, np.int64) for row in self.tokens.values()]
        return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.int64)

    def diverged(self, event: Event, backend: str, finding: Finding) -> Divergence:
        context = _context(self.events, event.seq)
        return Divergence(self.session_id, event.seq, event.op, backend, finding, context)


def read_story(
    row: SessionRow, events: Sequence[Event], tokens: Mapping[int, TokensRow], *, surrogate: bool = False
) -> Story:
    """Fold a session and compare its recorded digests.

    `tokens`: the rows with their token ids, or with surrogates where the log has none. Raises UsageError where an
    import does not tell which tokens were computed.
    """
    _require_content(row, events, tokens)
    states: list[ResidencyState] = []
    divergence: Divergence | None = None
    lost_at: int | None = None
    for event in events:
        before = states[-1] if states else ResidencyState()
        finding, after = _fold(before, event, tokens)
        if finding is not None:
            context = _context(events, event.seq)
            divergence = Divergence(row.session_id, event.seq, event.op, "log", finding, context)
            break
        if event.op == Op.LOST:
            lost_at = event.seq
            break
        states.append(after)
    ids = {seq: entry.tokens for seq, entry in tokens.items() if entry.tokens is not None}
    return Story(row, len(events), tuple(events[: len(states)]), tuple(states), ids, divergence, lost_at, surrogate)


def _fold(
    before: ResidencyState, event: Event, tokens: Mapping[int, TokensRow]
) -> tuple[Finding | None, ResidencyState]:
    try:
        after = apply(before, event)
    except IllegalEvent as err:
        return Finding(f"fold: {err.why}", tuple(before.resident.as_pairs()), None), before
    try:
        check_event(after, event)
    except ResidencyMismatch as err:
        what = f"fold: {err.what} recorded {err.recorded}, the fold of the log gives {err.folded}"
        return Finding(what, tuple(after.resident.as_pairs()), None), before
    if event.op in (Op.PREFILL, Op.DECODE):
        n, have = (event.stop or 0) - (event.start or 0), tokens.get(event.seq)
        if have is None or have.n_tokens != n or (have.tokens is not None and len(have.tokens) != n):
            return Finding(f"tokens: {n} were computed, the log keeps {have.n_tokens if have else 0}"), before
    return None, after


def _require_content(row: SessionRow, events: Sequence[Event], tokens: Mapping[int, TokensRow]) -> None:
    if row.model_fingerprint is None and not tokens and any(e.op in (Op.PREFILL, Op.DECODE) for e in events):
        raise UsageError(
            f"session {row.session_id} ({row.backend}) was imported, and its source tells how many tokens were "
            "computed, not which: there is nothing to compute again"
        )


def _context(events: Sequence[Event], seq: int) -> tuple[dict[str, Any], ...]:
    """Five events around `seq`, two before it where there are."""
    at = next((i for i, e in enumerate(events) if e.seq == seq), 0)
    first = max(0, min(at - 2, len(events) - _CONTEXT_EVENTS))
    around = events[first : first + _CONTEXT_EVENTS]
    return tuple({name: _plain(getattr(e, name)) for name in _CONTEXT_FIELDS} for e in around)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, str) else value


def _lists(pairs: tuple[tuple[int, int], ...] | None) -> list[list[int]] | None:
    return None if pairs is None else [list(pair) for pair in pairs]
