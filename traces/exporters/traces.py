"""The requests of a log as Mooncake and Bailian traces, and its block accesses as an oracleGeneral file."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

from kvtape.traces.errors import TraceError
from kvtape.traces.exporters.blocks import Reblocker
from kvtape.traces.exporters.requests import PromptRequest

__all__ = ["ACCESS", "bailian_lines", "block_accesses", "mooncake_lines", "oracle_general"]

ACCESS = struct.Struct("<IQIq")
"""oracleGeneral: u32 seconds, u64 object, u32 size, i64 index of the next access to it (-1: never again)."""

_NO_PARENT = -1


def mooncake_lines(requests: Sequence[PromptRequest]) -> Iterator[bytes]:
    """JSON lines: milliseconds, lengths, ids of 512-token blocks. Raises TraceError where no ids are known."""
    blocks = Reblocker(512)
    for r in requests:
        row = {"timestamp": _in_units(r.at_ns, 1_000_000), "input_length": r.n_tokens}
        yield _line({**row, "output_length": r.output_tokens, "hash_ids": _ids(blocks, r)})


def bailian_lines(requests: Sequence[PromptRequest]) -> Iterator[bytes]:
    """JSON lines: seconds, lengths, chat lineage, ids of 16-token blocks ([] where no ids are known)."""
    blocks = Reblocker(16)
    taken = {r.detail["chat_id"] for r in requests if isinstance(r.detail.get("chat_id"), int)}
    free = (n for n in range(len(requests) + len(taken)) if n not in taken)
    last: dict[str, tuple[int, int]] = {}
    for r in requests:
        chat = r.detail.get("chat_id")
        chat = chat if isinstance(chat, int) else next(free)
        parent, turn = last.get(r.session_id, (_NO_PARENT, 0))
        parent, turn = r.detail.get("parent_chat_id", parent), r.detail.get("turn", turn + 1)
        last[r.session_id] = (chat, turn)
        row = {"chat_id": chat, "parent_chat_id": parent, "timestamp": _in_units(r.at_ns, 10**9)}
        row |= {"input_length": r.n_tokens, "output_length": r.output_tokens, "type": r.detail.get("type", "text")}
        ids = [] if r.hashes is None else _ids(blocks, r)
        yield _line({**row, "turn": turn, "hash_ids": ids})


def _ids(blocks: Reblocker, r: PromptRequest) -> list[int]:
    if r.hashes is None or r.block_tokens is None:
        raise TraceError(
            f"session {r.session_id}, event {r.seq}: no block ids are known of this prompt"
            "; choose another --format, such as jsonl"
        )
    return blocks.ids(r.hashes, r.n_tokens, r.block_tokens)


def _in_units(ns: int, unit: int) -> Any:
    """A whole number where it is one, else decimal digits exactly."""
    whole, rest = divmod(ns, unit)
    return whole if not rest else Decimal(ns) / unit


def _line(row: dict[str, Any]) -> bytes:
    """Decimals as JSON numbers with every digit."""
    parts = (f"{json.dumps(k)}: {_json(v)}" for k, v in row.items())
    return ("{" + ", ".join(parts) + "}\n").encode()


def _json(value: Any) -> str:
    return format(value.normalize(), "f") if isinstance(value, Decimal) else json.dumps(value)


def block_accesses(requests: Sequence[PromptRequest]) -> Iterator[tuple[int, int]]:
    """(at_ns, hash) of every known block of every prompt, in order."""
    for r in requests:
        for h in r.hashes or ():
            yield r.at_ns, h


def oracle_general(requests: Sequence[PromptRequest]) -> bytes:
    """Every access with the index of the next one to the same block; each block has size 1."""
    accesses = list(block_accesses(requests))
    following: dict[int, int] = {}
    packed = bytearray(ACCESS.size * len(accesses))
    for i in range(len(accesses) - 1, -1, -1):
        at_ns, h = accesses[i]
        ACCESS.pack_into(packed, i * ACCESS.size, at_ns // 10**9, h, 1, following.get(h, -1))
        following[h] = i
    return bytes(packed)
