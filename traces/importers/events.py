"""From records to rows: the events of each session in order, with the hashes and tokens that belong to them.

    request of a session     open (once)   prompt   generate   close (at the end)
    step of an engine        open (once)   the step's own event

Columns that the source says nothing about are absent here and NULL in the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvtape.planner.events import Event, Op
from kvtape.traces.importers.columns import Columns, Row
from kvtape.traces.importers.protocol import Record, Request, Step
from kvtape.traces.tape import BLOCK_TOKENS, Tape, content_mac

__all__ = ["EventMaker"]


class _Session:
    __slots__ = ("at_ns", "generation", "id", "lost", "next_seq", "turn")

    def __init__(self, session_id: str) -> None:
        self.id = session_id
        self.next_seq = self.turn = self.generation = 0
        self.at_ns = 0
        self.lost = False


class EventMaker:
    """Collects rows by table; `take` hands them over and starts anew. Keeps where each session stands.

    `zero_ns`: the point on the source's clock that becomes 0. `key`: of the hashes of token ids. `content`: store ids.
    """

    def __init__(self, run_id: str, backend: str, zero_ns: int, key: bytes, *, content: bool) -> None:
        self.run_id, self._backend, self._zero_ns, self._key = run_id, backend, zero_ns, key
        self._content = content
        self._sessions: dict[str, _Session] = {}
        self._models: dict[str, str | None] = {}
        self.events, self.tokens, self.sessions, self.blocks = Columns(), Columns(), Columns(), Columns()

    @property
    def n_sessions(self) -> int:
        return len(self._models)

    def take(self) -> dict[str, Columns]:
        """The rows collected so far, by table; from here on they are collected anew."""
        found = {"sessions": self.sessions, "events": self.events, "tokens": self.tokens, "blocks": self.blocks}
        self.sessions, self.events, self.tokens, self.blocks = Columns(), Columns(), Columns(), Columns()
        return found

    def add(self, record: Record, session_id: str) -> None:
        if isinstance(record, Request):
            self._request(record, session_id)
        else:
            self._step(record)

    def closing(self) -> Iterator[int]:
        """End the sessions that are open, in the order in which they began; the seq of each end."""
        for session in self._sessions.values():
            if not session.lost:  # nothing is known of what comes after
                yield self._event(session, session.at_ns, Op.CLOSE)

    def _request(self, r: Request, session_id: str) -> None:
        session = self._opened(session_id, r.at_ns, r.model)
        detail: Row = {"line": r.line, **r.detail}
        if r.model is not None and r.model != self._models[session_id]:
            detail["model"] = r.model
        session.turn += 1
        prompt: Row = {"start": 0, "n_tokens": r.input_tokens, "prompt_tokens": r.input_tokens}
        if r.reused is not None:
            prompt["reused"], prompt["prefilled"] = r.reused, r.input_tokens - r.reused
        if r.first_token_ns is not None:
            prompt["elapsed_ns"] = r.first_token_ns
        seq = self._event(session, r.at_ns, Op.PROMPT, prompt, detail)
        tape = Tape(self._key)
        if r.prompt_ids is not None:
            self._hashed(session, seq, 0, r.prompt_ids, tape)
        elif r.hashes is not None:
            assert r.block_tokens is not None
            self._given(session, seq, 0, r.input_tokens, r.hashes, r.block_tokens)
        began = r.at_ns + (r.first_token_ns or 0)
        generate: Row = {}
        if r.output_tokens is not None:
            generate = {"n_tokens": r.output_tokens, "completion_tokens": r.output_tokens}
        if r.elapsed_ns is not None:
            generate["elapsed_ns"] = r.elapsed_ns - (r.first_token_ns or 0)
        if r.stop is not None:
            generate["reason"] = r.stop
        seq = self._event(session, began, Op.GENERATE, generate)
        if r.output_ids and r.prompt_ids is not None:
            self._hashed(session, seq, len(r.prompt_ids), r.output_ids, tape)
        session.at_ns = max(session.at_ns, r.at_ns + (r.elapsed_ns or r.first_token_ns or 0))

    def _step(self, step: Step) -> None:
        session = self._opened(step.session, step.at_ns, None, step.columns if step.op is Op.OPEN else {})
        if step.op is Op.OPEN:
            return
        session.turn += step.op is Op.PROMPT and step.columns.get("reason") != "suffix"
        session.generation += step.op in (Op.TRUNCATE, Op.RESTORE)
        session.lost = step.op is Op.LOST
        seq = self._event(session, step.at_ns, step.op, step.columns, step.detail)
        start, stop = step.columns.get("start", 0), step.columns.get("stop", 0)
        if step.hashes is not None:
            assert step.block_tokens is not None
            self._given(session, seq, start, stop - start, step.hashes, step.block_tokens, step.tokens)
        for block_id, first, last in step.blocks:
            place = {"block_id": block_id, "generation": session.generation, "start": first, "stop": last}
            kind = {"segment": "unknown", "cache_class": "volatile"}
            self.blocks.append({"session_id": session.id, "seq": seq, **place, **kind})

    def _opened(
        self, session_id: str, at_ns: int, model: str | None, facts: Mapping[str, Any] | None = None
    ) -> _Session:
        session = self._sessions.get(session_id)
        if session is None:
            session = self._sessions[session_id] = _Session(session_id)
            row: Row = {"session_id": session_id, "backend": self._backend, "content": self._content, **(facts or {})}
            if model is not None:
                row["model_name"] = model
            self._models[session_id] = model
            self.sessions.append(row)
            n_ctx = row.get("n_ctx")
            self._event(session, at_ns, Op.OPEN, {} if n_ctx is None else {"n_tokens": n_ctx})
        session.at_ns = max(session.at_ns, at_ns)
        return session

    def _event(
        self,
        session: _Session,
        at_ns: int,
        op: Op,
        columns: Mapping[str, Any] | None = None,
        detail: Mapping[str, Any] | None = None,
    ) -> int:
        seq = session.next_seq
        session.next_seq = seq + 1
        row: Row = {
            "session_id": session.id,
            "seq": seq,
            "at_ns": at_ns - self._zero_ns,
            "op": op.value,
            "turn": session.turn,
            "generation": session.generation,
        }
        if columns:
            row.update(columns)
        if detail:
            row["detail"] = msgspec.json.encode(detail).decode()
        self.events.append(row)
        return seq

    def _given(
        self,
        session: _Session,
        seq: int,
        start: int,
        n_tokens: int,
        hashes: Sequence[int],
        block_tokens: int,
        tokens: Sequence[int] | None = None,
    ) -> None:
        """Hashes that the source gave; token ids beside them are stored only where content is asked for."""
        row: Row = {
            "session_id": session.id,
            "seq": seq,
            "start": start,
            "n_tokens": n_tokens,
            "block_tokens": block_tokens,
            "hashes": _hex_list(hashes),
        }
        if tokens is not None:
            row["mac"] = content_mac(self._key, start, tokens)
            if self._content:
                row["tokens"] = tokens
        self.tokens.append(row)

    def _hashed(self, session: _Session, seq: int, start: int, ids: Sequence[int], tape: Tape) -> None:
        """Token ids that the source gave, hashed under the log's key as a recording hashes its own."""
        if not ids:
            return
        carrier = Event(
            run_id=self.run_id,
            session_id=session.id,
            seq=seq,
            at_ns=0,
            op=Op.PREFILL,
            turn=0,
            generation=0,
            start=start,
            stop=start + len(ids),
        )
        row: Row = {
            "session_id": session.id,
            "seq": seq,
            "start": start,
            "n_tokens": len(ids),
            "block_tokens": BLOCK_TOKENS,
            "hashes": msgspec.json.encode(tape.follow(carrier, ids)).decode(),
            "mac": content_mac(self._key, start, ids),
        }
        if self._content:
            row["tokens"] = ids
        self.tokens.append(row)


def _hex_list(hashes: Sequence[int]) -> str:
    """JSON of ids as hex of 16 digits, as a recording writes its own hashes."""
    return '["' + '","'.join([f"{h:016x}" for h in hashes]) + '"]' if hashes else "[]"
