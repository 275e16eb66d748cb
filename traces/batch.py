"""From queued items to the Arrow tables of one batch. Runs in the writer thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from kvtape.planner.events import Event
from kvtape.planner.rows import (
    BlockRow,
    CertificationRow,
    PlanRow,
    RunRow,
    ScoreRow,
    SessionRow,
    TokensRow,
    TrialRow,
)
from kvtape.traces.codec import to_arrow
from kvtape.traces.schema import (
    BLOCKS,
    CERTIFICATIONS,
    EVENTS,
    PLANS,
    RUNS,
    SCORES,
    SESSIONS,
    TABLES,
    TOKENS,
    TRIALS,
)
from kvtape.traces.tape import BLOCK_TOKENS, Tape, content_mac

__all__ = ["BatchBuilder", "Item"]

_BUILT = (SESSIONS, EVENTS, TOKENS, BLOCKS, PLANS, SCORES, TRIALS, CERTIFICATIONS)


@dataclass(slots=True)  # not frozen: the recording thread makes one for every event, and freezing is a third of it
class Item:
    """A session's row, an event with what belongs to it, trials or certifications. Never changed."""

    session: SessionRow | None = None
    event: Event | None = None
    tokens: tuple[int, ...] | None = None
    plan: PlanRow | None = None
    blocks: tuple[BlockRow, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    trials: tuple[TrialRow, ...] = ()
    certifications: tuple[CertificationRow, ...] = ()


class BatchBuilder:
    """Keeps each session's tape, so that token hashes go on from batch to batch."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._tapes: dict[str, Tape] = {}
        self._content: set[str] = set()

    def open_session(self, row: SessionRow) -> None:
        self._tapes[row.session_id] = Tape(self._key)
        if row.content:
            self._content.add(row.session_id)

    def build_run(self, run: RunRow) -> dict[str, pa.Table]:
        return {RUNS.name: to_arrow(RUNS, [run])}

    def build(self, items: Sequence[Item]) -> dict[str, pa.Table]:
        """Arrow tables by name; tables without rows are left out."""
        rows: dict[str, list[Any]] = {t.name: [] for t in _BUILT}
        for item in items:
            if item.session is not None:
                self.open_session(item.session)
                rows[SESSIONS.name].append(item.session)
            rows[TRIALS.name].extend(item.trials)
            rows[CERTIFICATIONS.name].extend(item.certifications)
            if item.event is None:
                continue
            rows[EVENTS.name].append(item.event)
            rows[BLOCKS.name].extend(item.blocks)
            rows[SCORES.name].extend(item.scores)
            if item.plan is not None:
                rows[PLANS.name].append(item.plan)
            hashes = self.follow(item.event, item.tokens)
            if item.tokens is not None:
                rows[TOKENS.name].append(self._tokens_row(item.event, item.tokens, hashes))
        return {name: to_arrow(TABLES[name], found) for name, found in rows.items() if found}

    def follow(self, event: Event, tokens: Sequence[int] | None) -> list[str]:
        """Move the session's tape on; the hashes of what the event touched."""
        return self._tapes[event.session_id].follow(event, tokens)

    def _tokens_row(self, event: Event, tokens: tuple[int, ...], hashes: list[str]) -> TokensRow:
        assert event.start is not None
        return TokensRow(
            run_id=event.run_id,
            session_id=event.session_id,
            seq=event.seq,
            start=event.start,
            n_tokens=len(tokens),
            block_tokens=BLOCK_TOKENS,
            hashes=_hex_list(hashes),
            mac=content_mac(self._key, event.start, tokens),
            tokens=tokens if event.session_id in self._content else None,
        )


def _hex_list(hashes: list[str]) -> str:
    """JSON of a list of hex strings, which need no escapes: this runs for every decode event."""
    return '["' + '","'.join(hashes) + '"]' if hashes else "[]"
