"""Requests from a log: every prompt with the hashes of all its blocks.

An imported prompt bears its ids. A recorded one bears none; what it brought stands on the prefills behind it, what it
shared with the tape on earlier events of its session. So the hashes of the tape are followed through the session.
Generated tokens are asked for by nobody: they enter with the first prompt that holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvtape.planner.deferral import DEFERRED
from kvtape.sim.blocks.block_trace import BlockTrace, Requests
from kvtape.sim.blocks.errors import CurveError
from kvtape.sim.blocks.gathering import Gathering
from kvtape.traces.database import readable
from kvtape.traces.hash_tape import HashTape
from kvtape.traces.reader import Log

__all__ = ["read_log", "read_log_requests"]

_QUERY = """
SELECT e.session_id, e.seq, e.at_ns, e.op::VARCHAR AS op, e.start, e.stop, e.n_tokens, e.reason, e.snapshot_id,
       e.detail, t.block_tokens, t.hashes
FROM events e LEFT JOIN tokens t USING (run_id, session_id, seq)
WHERE e.run_id = ? AND e.op IN ('prompt', 'generate', 'prefill', 'decode', 'truncate', 'lost', 'snapshot', 'restore',
    'close')
ORDER BY e.session_id, e.seq
"""

_ANSWERS = """
SELECT session_id, prompt, coalesce(sum(n_tokens) FILTER (op = 'decode'), sum(n_tokens) FILTER (op = 'generate'), 0)
FROM (SELECT session_id, op::VARCHAR AS op, n_tokens,
             count(*) FILTER (op = 'prompt') OVER (PARTITION BY session_id ORDER BY seq) AS prompt
      FROM events WHERE run_id = ? AND op IN ('prompt', 'generate', 'decode'))
WHERE op <> 'prompt' GROUP BY ALL
"""
"""Tokens of the answer to each prompt of a session, the first being 1: those that came, or else that were asked for."""

_ENDS_A_PROMPT = frozenset({"prompt", "generate", "decode", "snapshot", "restore", "lost", "close"})


class _Asked(NamedTuple):
    """A prompt: when, the line of its source, whose, which of it, and the ids of its blocks of `size` tokens."""

    at_ns: int
    line: int
    session: str
    seq: int
    n_tokens: int
    ids: list[int]
    size: int | None
    number: int


@dataclass(slots=True)
class _Session:
    """The one that is read: its tape, and the prompts that are being computed: of those that wait there may be some."""

    session_id: str
    tape: HashTape = field(default_factory=HashTape)
    pending: list[_Asked] = field(default_factory=list)
    prompts: int = 0


def read_log(log: Log, run_id: str | None = None) -> BlockTrace:
    """The prompts of a run (default: `log.default_run()`) by time, then by line of the source, then by session.

    Prompts that were refused or failed were not admitted and do not count. Raises NoBlocks, NoSuchRow, LogUnreadable.
    """
    run = run_id if run_id is not None else log.default_run().run_id
    return _gathered(log, run, {}).trace(log.logical_digest(run), ordered=True)


def read_log_requests(log: Log, run_id: str | None = None) -> Requests:
    """The same with the time and the answer of each. Raises as `read_log`."""
    run = run_id if run_id is not None else log.default_run().run_id
    with readable(log.path):
        rows = log.connection.sql(_ANSWERS, params=[run]).fetchall()
    answers = {(session, number): int(n) for session, number, n in rows}
    return _gathered(log, run, answers).requests(log.logical_digest(run))


def _gathered(log: Log, run: str, answers: Mapping[tuple[str, int], int]) -> Gathering:
    found = sorted(_prompts(log, run), key=lambda asked: asked[:4])
    if not found:
        raise CurveError(f"{log.path}: run {run} has no prompt; a curve needs requests")
    gathering = Gathering(str(log.path))
    for asked in found:
        answer = answers.get((asked.session, asked.number), 0)
        gathering.add(asked.at_ns, asked.n_tokens, asked.ids, asked.size, answer)
    return gathering


def _prompts(log: Log, run: str) -> Iterator[_Asked]:
    session = _Session("")
    with readable(log.path):
        for batch in log.connection.sql(_QUERY, params=[run]).to_arrow_reader(65_536):
            for row in batch.to_pylist():
                if row["session_id"] != session.session_id:
                    yield from _taken(session)
                    session = _Session(row["session_id"])
                yield from _follow(session, row)
    yield from _taken(session)


def _follow(session: _Session, row: dict[str, Any]) -> Iterator[_Asked]:
    """The prompt that the event ends, if it ends one; the tape then knows what the event brought."""
    op, size = row["op"], row["block_tokens"]
    ids = _ids(row["hashes"]) if row["hashes"] is not None else None
    joins = op == "prompt" and row["reason"] == "suffix" and row["detail"] == DEFERRED
    if op in _ENDS_A_PROMPT and not joins:
        yield from _taken(session)
    if op == "prompt":
        session.prompts += 1
        n_tokens = row["n_tokens"] + (row["start"] if row["reason"] == "suffix" else 0)
        place = row["at_ns"], _line(row), session.session_id, row["seq"]
        asked = _Asked(*place, n_tokens, ids or [], size, session.prompts)
        if ids is None:
            session.pending.append(asked)
        else:
            yield asked
    session.tape.follow(op, row["start"], row["stop"], row["snapshot_id"], ids, size)


def _taken(session: _Session) -> Iterator[_Asked]:
    """What was being computed, if all of it got on the tape (a refused prompt did not) or nothing tells."""
    pending, session.pending = session.pending, []
    tape = session.tape
    for asked in pending:
        if tape.size is None or tape.length >= asked.n_tokens:
            yield asked._replace(ids=tape.path(asked.n_tokens) or [], size=tape.size)


def _line(row: dict[str, Any]) -> int:
    """Of the source, where the event came from one: what orders requests of one stamp."""
    said = msgspec.json.decode(row["detail"]) if row["detail"] else {}
    line = said.get("line", 0) if isinstance(said, dict) else 0
    return line if isinstance(line, int) else 0


def _ids(hashes: str) -> list[int]:
    values = msgspec.json.decode(hashes, type=list[str])
    found: list[int] = np.frombuffer(bytes.fromhex("".join(values)), ">u8").tolist()
    return found
