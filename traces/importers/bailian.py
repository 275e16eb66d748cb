"""Bailian (Qwen) usage traces: JSON lines with chat lineage and salted ids of 16-token blocks.

Seconds from 0. A chat names its parent (-1 for none): the chats of one root are one session. `hash_ids` may be empty,
which says that the ids are not known, not that the prompt had no blocks. A prompt need not extend the one before it:
templates strip what the model thought.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

from kvtape.traces.importers.jsonl import json_rows
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked, Record, Request, Rules
from kvtape.traces.importers.sniffing import first_object
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.values import SECOND, block_ids, check_block_count, count, duration_ns

__all__ = ["BAILIAN", "Bailian"]

_NO_PARENT = -1


class _Row(msgspec.Struct):
    chat_id: int
    parent_chat_id: int
    timestamp: Decimal
    input_length: int
    output_length: int
    hash_ids: list[int]
    type: str | None = None
    turn: int | None = None


class Bailian:
    name = "bailian"
    summary = "Bailian (Qwen) usage traces (JSON lines with chat_id, parent_chat_id, hash_ids of 16-token blocks)"
    rules = Rules("seconds", 16, "ceil", "global")

    def recognises(self, head: bytes, name: str) -> bool:
        return {"chat_id", "parent_chat_id", "hash_ids", "timestamp"} <= first_object(head).keys()

    def read(self, source: Source, notes: Notes, asked: Asked) -> Iterator[Record]:
        size = asked.block_tokens or 16
        parents: dict[int, int] = {}
        found: list[tuple[int, int, dict[str, Any]]] = []
        for row in json_rows(source, _Row, drop_repeated=asked.drop_duplicates):
            chat = count(source, "chat_id", row.chat_id)
            if row.parent_chat_id != _NO_PARENT:
                parents[chat] = count(source, "parent_chat_id", row.parent_chat_id)
            else:
                parents.setdefault(chat, _NO_PARENT)
            found.append((source.line, chat, self._columns(source, row, size, notes)))
        for line, chat, columns in found:
            yield Request(line=line, session=f"chat-{_root(source, notes, parents, chat, line)}", **columns)

    def _columns(self, source: Source, row: _Row, size: int, notes: Notes) -> dict[str, Any]:
        n = count(source, "input_length", row.input_length)
        ids = block_ids(source, "hash_ids", row.hash_ids)
        if ids:
            check_block_count(source, "hash_ids", len(ids), n, size, "ceil")
        elif n:
            notes.warn("no_block_ids", source.name, source.line, "no block ids: what the prompt shares is not known")
        said = {"chat_id": row.chat_id, "parent_chat_id": row.parent_chat_id, "type": row.type, "turn": row.turn}
        return {
            "at_ns": duration_ns(source, "timestamp", row.timestamp, SECOND),
            "input_tokens": n,
            "output_tokens": count(source, "output_length", row.output_length),
            "hashes": ids or None,
            "block_tokens": size,
            "detail": {k: v for k, v in said.items() if v is not None},
        }


def _root(source: Source, notes: Notes, parents: dict[int, int], chat: int, line: int) -> int:
    """The first ancestor. One that is not in the file is still a root; a circle has none and is refused."""
    way = [chat]
    while (parent := parents.get(way[-1], _NO_PARENT)) != _NO_PARENT:
        if parent in way:
            source.line = line
            raise source.rejected("parent_chat_id", f"chat {chat} descends from itself", "correct the lineage")
        if parent not in parents:
            text = "the parent chat is not in the file: the session begins in the middle"
            notes.warn("unknown_parent", source.name, line, text)
        way.append(parent)
    for passed in way[:-1]:
        parents[passed] = way[-1]  # the next one need not walk
    return way[-1]


BAILIAN = Bailian()
