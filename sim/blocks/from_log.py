"""Requests from a log: every prompt with the hashes of all its blocks.

An imported prompt bears its ids. A recorded one bears none; what it brought stands on the prefills behind it, what it
shared with the tape on earlier events of its session. So the hashes of the tape are followed through the session.
Generated tokens are asked for by nobody: they enter with the first prompt that holds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtape.sim.blocks.block_trace import BlockTrace
from kvtape.sim.blocks.errors import CurveError
from kvtape.sim.blocks.gathering import Gathering
from kvtape.traces.database import readable
from kvtape.traces.reader import Log

__all__ = ["read_log"]

_QUERY = """
SELECT e.session_id, e.seq, e.at_ns, e.op::VARCHAR AS op, e.start, e.n_tokens, e.reason, e.snapshot_id, e.detail,
       t.start AS first, t.n_tokens AS brought, t.block_tokens, t.hashes
FROM events e LEFT JOIN tokens t USING (run_id, session_id, seq)
WHERE e.run_id = ? AND (t.hashes IS NOT NULL
    OR e.op IN ('prompt', 'generate', 'decode', 'truncate', 'lost', 'snapshot', 'restore', 'close'))
ORDER BY e.session_id, e.seq
"""

_ENDS_A_PROMPT = frozenset({"prompt", "generate", "decode", "snapshot", "restore", "lost", "close"})


class _Asked(NamedTuple):
    """A prompt: when, the line of its source, whose, and the ids of its blocks of `size` tokens."""

    at_ns: int
    line: int
    session: str
    seq: int
    n_tokens: int
    ids: list[int]
    size: int | None


@dataclass(slots=True)
class _Tape:
    """One session's tape: its length, hashes of whole blocks by number, and of a partial last one by where it ends."""

    session: str
    length: int = 0
    blocks: dict[int, int] = field(default_factory=dict)
    tail: tuple[int, int] | None = None
    size: int | None = None
    saved: dict[int, tuple[int, dict[int, int], tuple[int, int] | None]] = field(default_factory=dict)
    pending: _Asked | None = None

    def brought(self, first: int, n_tokens: int, size: int, ids: list[int]) -> None:
        self.size = size
        self.length = max(self.length, first + n_tokens)
        whole = (first + n_tokens) // size
        for number, value in enumerate(ids, first // size):
            if number < whole:
                self.blocks[number] = value
            else:
                self.tail = first + n_tokens, value

    def path(self, length: int) -> list[int]:
        """Ids of the blocks of the first `length` tokens; none where one of them is not known."""
        if self.size is None:
            return []
        try:
            ids = [self.blocks[i] for i in range(length // self.size)]
        except KeyError:
            return []
        return [*ids, self.tail[1]] if self.tail is not None and self.tail[0] == length and length % self.size else ids


def read_log(log: Log, run_id: str | None = None) -> BlockTrace:
    """The prompts of a run (default: `log.default_run()`) by time, then by line of the source, then by session.

    Prompts that were refused or failed were not admitted and do not count. Raises NoBlocks, NoSuchRow, LogUnreadable.
    """
    run = run_id if run_id is not None else log.default_run().run_id
    found = sorted(_prompts(log, run), key=lambda asked: asked[:4])
    if not found:
        raise CurveError(f"{log.path}: run {run} has no prompt; a curve needs requests")
    gathering = Gathering(str(log.path))
    for at_ns, _, _, _, n_tokens, ids, size in found:
        gathering.add(at_ns, n_tokens, ids, size)
    return gathering.trace(log.logical_digest(run), ordered=True)


def _prompts(log: Log, run: str) -> Iterator[_Asked]:
    tape = _Tape("")
    with readable(log.path):
        for batch in log.connection.sql(_QUERY, params=[run]).to_arrow_reader(65_536):
            for row in batch.to_pylist():
                if row["session_id"] != tape.session:
                    yield from _taken(tape)
                    tape = _Tape(row["session_id"])
                yield from _follow(tape, row)
    yield from _taken(tape)


def _follow(tape: _Tape, row: dict[str, Any]) -> Iterator[_Asked]:
    """The prompt that the event ends, if it ends one; the tape then knows what the event brought."""
    op = row["op"]
    ids = _ids(row["hashes"]) if row["hashes"] is not None else None
    if op in _ENDS_A_PROMPT:
        yield from _taken(tape)
    if op == "prompt":
        n_tokens = row["n_tokens"] + (row["start"] if row["reason"] == "suffix" else 0)
        asked = _Asked(row["at_ns"], _line(row), tape.session, row["seq"], n_tokens, ids or [], row["block_tokens"])
        if ids is None:
            tape.pending = asked
        else:
            yield asked
    elif op == "snapshot":
        tape.saved[row["snapshot_id"]] = (tape.length, dict(tape.blocks), tape.tail)
    elif op in ("restore", "lost"):
        tape.length, blocks, tape.tail = tape.saved.get(row["snapshot_id"], (0, {}, None))
        tape.blocks = dict(blocks)
    elif op == "truncate":
        tape.length = row["start"]
    elif ids is not None:
        tape.brought(row["first"], row["brought"], row["block_tokens"], ids)


def _taken(tape: _Tape) -> Iterator[_Asked]:
    """The prompt that was being computed, if all of it got on the tape (a refused one did not) or nothing tells."""
    asked, tape.pending = tape.pending, None
    if asked is not None and (tape.size is None or tape.length >= asked.n_tokens):
        yield asked._replace(ids=tape.path(asked.n_tokens), size=tape.size)


def _line(row: dict[str, Any]) -> int:
    """Of the source, where the event came from one: what orders requests of one stamp."""
    said = msgspec.json.decode(row["detail"]) if row["detail"] else {}
    line = said.get("line", 0) if isinstance(said, dict) else 0
    return line if isinstance(line, int) else 0


def _ids(hashes: str) -> list[int]:
    values = msgspec.json.decode(hashes, type=list[str])
    found: list[int] = np.frombuffer(bytes.fromhex("".join(values)), ">u8").tolist()
    return found
