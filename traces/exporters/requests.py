"""The requests of a log with the blocks of their prompts, whether they were recorded here or imported.

An import has the ids of a whole prompt beside its prompt event. A recording has the hash chain of the 32-token blocks
that each prefill and decode touched; what a prompt was is put together from them, by the tape it was computed on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtape.planner.events import Op
from kvtape.traces.reader import Log
from kvtape.traces.schema import quoted_text

__all__ = ["PromptRequest", "prompt_requests"]


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """`at_ns` from the run's beginning. `hashes` of `block_tokens` tokens each; None where no ids are known.

    `output_tokens` None where it is not known. `detail` of the prompt event.
    """

    session_id: str
    turn: int
    seq: int
    at_ns: int
    n_tokens: int
    output_tokens: int | None
    hashes: tuple[int, ...] | None
    block_tokens: int | None
    detail: dict[str, Any]


def prompt_requests(log: Log, run_id: str) -> list[PromptRequest]:
    """The requests of a run by (time, session, seq)."""
    events = log.sql(
        f"""SELECT e.session_id, e.seq, e.at_ns, e.op, e.turn, e."start", e."stop", e.n_tokens, e.completion_tokens,
            e.reason, e.detail, t.hashes, t.block_tokens, t.n_tokens FROM events e LEFT JOIN tokens t
            USING (run_id, session_id, seq) WHERE e.run_id = {quoted_text(run_id)} AND e.op IN ('prompt', 'generate',
            'prefill', 'decode', 'truncate', 'restore', 'lost') ORDER BY e.session_id, e.seq"""
    )[1]
    found: list[PromptRequest] = []
    session: _Session | None = None
    for row in events:
        if session is None or session.id != row[0]:
            if session is not None:
                found += session.ended()
            session = _Session(row[0])
        found += session.follow(*row[1:])
    if session is not None:
        found += session.ended()
    return sorted(found, key=lambda r: (r.at_ns, r.session_id, r.seq))


class _Session:
    """Follows one session's events: the hash chain of its tape, and the request that is open."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self._chain: list[int] | None = []
        self._tail: tuple[int, int] | None = None
        self._open: dict[str, Any] | None = None

    def follow(
        self,
        seq: int,
        at_ns: int,
        op: str,
        turn: int,
        start: int | None,
        stop: int | None,
        n_tokens: int | None,
        completion: int | None,
        reason: str | None,
        detail: str | None,
        hashes: str | None,
        block_tokens: int | None,
        n_hashed: int | None,
    ) -> Iterator[PromptRequest]:
        """The request that this event ends, if it does."""
        ids = None if hashes is None else [int(h, 16) for h in json.loads(hashes)]
        if op == Op.PROMPT and reason != "suffix":
            yield from self.ended()
            known = json.loads(detail) if detail else {}
            self._open = {"seq": seq, "at_ns": at_ns, "turn": turn, "n_tokens": n_tokens, "detail": known, "out": None}
            self._open |= {"hashes": ids, "size": block_tokens if ids is not None else None}
        elif op in (Op.PREFILL, Op.DECODE) and start is not None and stop is not None:
            self._extend(start, stop, ids, block_tokens)
            self._settle(stop)
        elif op in (Op.TRUNCATE, Op.RESTORE, Op.LOST):
            self._cut(start if op == Op.TRUNCATE else None)
        if completion is not None and self._open is not None:
            self._open["out"] = (self._open["out"] or 0) + completion

    def _extend(self, start: int, stop: int, ids: list[int] | None, size: int | None) -> None:
        """The chain with the blocks that the event touched; unknown from here on where it has no hashes."""
        first = start // size if size else 0
        if ids is None or size is None or self._chain is None or first > len(self._chain):
            self._chain = self._tail = None
            return
        whole = stop // size
        self._chain = [*self._chain[:first], *ids[: whole - first]]
        self._tail = (stop, ids[-1]) if stop % size and len(ids) > whole - first else None

    def _settle(self, stop: int) -> None:
        """Once the tape is as long as the prompt its blocks are known; generated tokens come behind it."""
        request = self._open
        if request is None or request["hashes"] is not None or stop != request["n_tokens"] or self._chain is None:
            return
        tail = [self._tail[1]] if self._tail is not None and self._tail[0] == stop else []
        request["hashes"], request["size"] = [*self._chain, *tail], 32

    def _cut(self, length: int | None) -> None:
        if length is None:
            self._chain = self._tail = None
        elif self._chain is not None:
            self._chain, self._tail = self._chain[: length // 32], None

    def ended(self) -> Iterator[PromptRequest]:
        request, self._open = self._open, None
        if request is not None and request["n_tokens"] is not None:
            yield PromptRequest(
                session_id=self.id,
                turn=request["turn"],
                seq=request["seq"],
                at_ns=request["at_ns"],
                n_tokens=request["n_tokens"],
                output_tokens=request["out"],
                hashes=None if request["hashes"] is None else tuple(request["hashes"]),
                block_tokens=request["size"],
                detail=request["detail"],
            )
