"""Mooncake request traces: JSON lines {timestamp, input_length, output_length, hash_ids}.

Milliseconds from 0, blocks of 512 tokens with a partial last one, ids that mean the same block everywhere. Stamps are
coarse (many requests share one), so the order is by (time, line).
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal

import msgspec

from kvtape.traces.importers.jsonl import json_rows
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.sniffing import first_object
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.values import MS, block_ids, check_block_count, count, duration_ns

__all__ = ["MOONCAKE", "Mooncake"]


class _Row(msgspec.Struct):
    timestamp: Decimal
    input_length: int
    output_length: int
    hash_ids: list[int]


class Mooncake:
    name = "mooncake"
    summary = "Mooncake request traces (JSON lines with hash_ids of 512-token blocks)"
    rules = Rules("milliseconds", 512, "ceil", "global")

    def recognises(self, head: bytes, name: str) -> bool:
        first = first_object(head)
        return {"timestamp", "input_length", "output_length", "hash_ids"} == first.keys()

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        size = asked.block_tokens or 512
        for row in json_rows(source, _Row, drop_repeated=asked.drop_duplicates):
            ids = block_ids(source, "hash_ids", row.hash_ids)
            n = count(source, "input_length", row.input_length)
            check_block_count(source, "hash_ids", len(ids), n, size, "ceil")
            yield Request(
                line=source.line,
                at_ns=duration_ns(source, "timestamp", row.timestamp, MS),
                input_tokens=n,
                output_tokens=count(source, "output_length", row.output_length),
                hashes=ids,
                block_tokens=size,
            )


MOONCAKE = Mooncake()
