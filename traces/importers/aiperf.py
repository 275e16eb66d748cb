"""AIPerf session traces: JSON lines in which each row of a session holds only what is new.

The first row of a session has its arrival (ms) and its whole prompt; a later one has `delay` (ms), its NEW tokens and
the NEW ids of 512-token blocks. The whole prompt is put together again here. Its blocks do not begin at multiples of
512 any more, so they are cut anew: a block that is one id keeps it, one of several pieces gets a hash of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

from kvtape.traces.importers.jsonl import json_rows
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.sniffing import first_object
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.values import MS, block_ids, check_block_count, count, duration_ns

__all__ = ["AIPERF", "Aiperf", "Context"]


class _Row(msgspec.Struct):
    session_id: str
    input_length: int
    output_length: int
    hash_ids: list[int]
    timestamp: Decimal | None = None
    delay: Decimal | None = None
    group_id: int | None = None


@dataclass
class Context:
    """A prompt that grows by pieces, cut into regular blocks of `size` tokens.

    `whole`: hashes of the full blocks; `rest`: the pieces (id, first, stop) behind the last full block.
    """

    size: int
    n_tokens: int = 0
    whole: list[int] = field(default_factory=list)
    rest: list[tuple[int, int, int]] = field(default_factory=list)

    def add(self, ids: list[int], n_tokens: int) -> None:
        """`n_tokens` more tokens in blocks with these ids, each full but the last."""
        for i, number in enumerate(ids):
            left = min(self.size, n_tokens - i * self.size)
            first = 0
            while left:
                room = self.size - self.n_tokens % self.size
                step = min(left, room)
                self.rest.append((number, first, first + step))
                self.n_tokens += step
                first, left = first + step, left - step
                if step == room:
                    self.whole.append(self._hash())
                    self.rest = []

    def hashes(self) -> list[int]:
        """Of every block, a partial last one included."""
        return [*self.whole, self._hash()] if self.rest else list(self.whole)

    def _hash(self) -> int:
        if len(self.rest) == 1 and self.rest[0][1] == 0:
            return self.rest[0][0]
        raw = b"".join(v.to_bytes(8, "little") for piece in self.rest for v in piece)
        return int.from_bytes(hashlib.blake2b(raw, digest_size=8, person=b"kvtape pieces").digest())


class Aiperf:
    name = "aiperf"
    summary = "AIPerf session traces (JSON lines; later rows of a session hold only new tokens and ids)"
    rules = Rules("milliseconds", 512, "ceil", "global")

    def recognises(self, head: bytes, name: str) -> bool:
        return {"session_id", "input_length", "output_length", "hash_ids"} <= first_object(head).keys()

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        size = asked.block_tokens or 512
        contexts: dict[str, Context] = {}
        times: dict[str, int] = {}
        for row in json_rows(source, _Row, drop_repeated=asked.drop_duplicates):
            ids = block_ids(source, "hash_ids", row.hash_ids)
            new = count(source, "input_length", row.input_length)
            check_block_count(source, "hash_ids", len(ids), new, size, "ceil")
            context = contexts.setdefault(row.session_id, Context(size))
            context.add(list(ids), new)
            times[row.session_id] = self._time(source, row, times.get(row.session_id), notes)
            detail: dict[str, Any] = {"new_tokens": new, "hash_ids": row.hash_ids}
            if row.group_id is not None:
                detail["group_id"] = row.group_id
            yield Request(
                line=source.line,
                at_ns=times[row.session_id],
                session=row.session_id,
                input_tokens=context.n_tokens,
                output_tokens=count(source, "output_length", row.output_length),
                hashes=context.hashes(),
                block_tokens=size,
                detail=detail,
            )

    def _time(self, source: Source, row: _Row, before: int | None, notes: Notes) -> int:
        if row.timestamp is not None:
            return duration_ns(source, "timestamp", row.timestamp, MS)
        if before is None:
            raise source.rejected("timestamp", "is missing", "the first row of a session has its arrival")
        if row.delay is None:
            raise source.rejected("delay", "is missing", "a later row of a session has its delay")
        text = "a delay counts from the end of the answer, whose time is not told: the arrival is the earliest possible"
        notes.warn("arrival_floor", source.name, source.line, text)
        return before + duration_ns(source, "delay", row.delay, MS)


AIPERF = Aiperf()
