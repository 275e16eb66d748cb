"""The requests of a log with the blocks of their prompts, whether they were recorded here or imported.

An import has the ids of a whole prompt beside its prompt event. A recording has the hash chain of the 32-token blocks
that each prefill and decode touched; what a prompt was is put together from them, by the tape it is on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvtape.planner.deferral import DEFERRED
from kvtape.planner.events import Op
from kvtape.traces.hash_tape import HashTape
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
            e.reason, e.snapshot_id, e.detail, t.hashes, t.block_tokens FROM events e LEFT JOIN tokens t
            USING (run_id, session_id, seq) WHERE e.run_id = {quoted_text(run_id)} AND e.op IN ('prompt', 'generate',
            'prefill', 'decode', 'truncate', 'snapshot', 'restore', 'lost') ORDER BY e.session_id, e.seq"""
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
    """Follows one session's events: its tape, and the request that is open."""

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self._tape = HashTape()
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
        snapshot_id: int | None,
        detail: str | None,
        hashes: str | None,
        block_tokens: int | None,
    ) -> Iterator[PromptRequest]:
        """The request that this event ends, if it does."""
        ids = None if hashes is None else [int(h, 16) for h in json.loads(hashes)]
        if op == Op.PROMPT and reason != "suffix":
            yield from self.ended()
            known = json.loads(detail) if detail else {}
            self._open = {"seq": seq, "at_ns": at_ns, "turn": turn, "n_tokens": n_tokens, "detail": known, "out": None}
            self._open |= {"hashes": ids, "size": block_tokens, "computing": ids is None}
            if start == n_tokens:  # no prefill follows
                self._settle(n_tokens)
        elif op in (Op.PROMPT, Op.GENERATE) and self._open is not None and detail != DEFERRED:
            self._open["computing"] = False
        self._tape.follow(op, start, stop, snapshot_id, ids, block_tokens)
        if op == Op.PREFILL:
            self._settle(stop)
        if completion is not None and self._open is not None:
            self._open["out"] = (self._open["out"] or 0) + completion

    def _settle(self, length: int | None) -> None:
        """Once the tape is as long as the prompt its blocks are known; what comes behind it is no part of it."""
        request = self._open
        wanted = None if request is None or not request["computing"] else request["n_tokens"]
        if request is None or length is None or wanted is None or length < wanted:
            return
        # With a suffix that waited too, one piece goes on past the prompt.
        request["hashes"], request["computing"] = self._tape.path(wanted), False
        request["size"] = None if request["hashes"] is None else self._tape.size

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
