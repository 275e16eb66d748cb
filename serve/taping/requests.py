"""What a pipeline tells of its requests, as events: what was asked and what came, and nothing of what is resident.

A session of requests has a `prompt` and a `generate` for each and no event that changes the fold's resident set, as the
sessions of an imported trace of requests have; columns that nobody told are NULL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvtape.backends.journal import Journal
from kvtape.backends.protocol import Clock, EventSink
from kvtape.planner.events import Op
from kvtape.planner.rows import SessionRow

__all__ = ["RequestLog"]


class RequestLog:
    """One session of requests. `said`: of the session, for its open event."""

    def __init__(self, sink: EventSink, clock: Clock, row: SessionRow, said: Mapping[str, Any]) -> None:
        sink.open_session(row)
        self._clock = clock
        self._journal = Journal(sink, clock, row.run_id, row.session_id)
        self._journal.emit(Op.OPEN, clock.now_ns(), detail=_json(said))

    def asked(self, began_ns: int, n_tokens: int, source: str, detail: Mapping[str, Any], first_ns: int | None) -> None:
        """A prompt of `n_tokens`, counted by `source` (engine or fallback); `first_ns` until the first token came."""
        self._journal.emit(
            Op.PROMPT,
            began_ns,
            start=0,
            n_tokens=n_tokens,
            prompt_tokens=n_tokens,
            token_count_source=source,
            elapsed_ns=first_ns,
            detail=_json(detail),
        )

    def answered(
        self,
        began_ns: int,
        n_tokens: int | None,
        source: str,
        ended: str | None,
        elapsed_ns: int | None,
        detail: Mapping[str, Any],
    ) -> None:
        """What came of it; `n_tokens` None where nobody counted."""
        self._journal.emit(
            Op.GENERATE,
            began_ns,
            n_tokens=n_tokens,
            completion_tokens=n_tokens,
            token_count_source=None if n_tokens is None else source,
            reason=ended,
            elapsed_ns=elapsed_ns,
            detail=_json(detail),
        )

    def refused(self, error_class: str) -> None:
        self._journal.emit(Op.REFUSE, self._clock.now_ns(), reason="the pipeline raised", error_class=error_class)

    def lost(self, cause: Exception) -> None:
        """From here on nothing is known; of the cause only its class is written."""
        detail = _json({"cause": type(cause).__name__})
        self._journal.emit(Op.LOST, self._clock.now_ns(), reason="capture_stopped", detail=detail)

    def close(self) -> None:
        if not self._journal.state.lost:
            self._journal.emit(Op.CLOSE, self._clock.now_ns())


def _json(said: Mapping[str, Any]) -> str | None:
    return json.dumps(said, sort_keys=True) if said else None
