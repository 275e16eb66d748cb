"""The wire forms of KV events: batches of vLLM and SGLang as positional arrays or as maps, packed or as JSON.

    array   [ts, [["BlockStored", hashes, parent, token_ids, block_size, lora_id, medium, lora_name], ...], rank]
    map     {"ts": .., "events": [{"type": "BlockStored", "block_hashes": [..], ...}], "data_parallel_rank": 0}
    file    frames of u64 sequence, u32 length (big-endian) and a MessagePack batch; or JSON lines of batches, with or
            without {"wire": .., "batch": ..} around them; or of single events

A hash is an integer or bytes, of which the first 8 count (big-endian); two hashes that agree in them are refused.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import msgspec

from kvtape.traces.importers.jsonl import refuse_repeated_keys
from kvtape.traces.importers.protocol import U64_MAX
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.values import SECOND, duration_ns

__all__ = ["Batch", "KvEvent", "Unpacker", "frames", "is_framed", "json_batches"]

Tag = Literal["BlockStored", "BlockRemoved", "AllBlocksCleared"]

_POSITIONS: dict[str, tuple[str, ...]] = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
_HEADER = struct.Struct(">QI")
_HASH_BYTES = 8
_ID_REMEDY = "a hash is an unsigned 64-bit integer, or bytes of at least 8"


@dataclass(frozen=True, slots=True)
class KvEvent:
    """`hashes` u64, `parent` u64; `tokens` None where the event has none. `ignored`: fields that mean nothing here."""

    tag: Tag
    hashes: tuple[int, ...] = ()
    parent: int | None = None
    tokens: Sequence[int] | None = None
    block_tokens: int | None = None
    lora: str | None = None
    medium: str | None = None
    ignored: int = 0


@dataclass(frozen=True, slots=True)
class Batch:
    """`sequence` of the publisher, `rank` of the engine, `raw` for telling a repeated batch. None where not said."""

    at_ns: int | None
    rank: int | None
    events: tuple[KvEvent, ...]
    sequence: int | None = None
    raw: bytes = b""


@dataclass
class Unpacker:
    """Makes batches of decoded values of one file."""

    source: Source
    _whole: dict[int, bytes] = field(default_factory=dict)

    def batch(self, value: Any, sequence: int | None = None, raw: bytes = b"") -> Batch:
        stamp: Any
        if isinstance(value, dict) and "batch" in value:
            value = value["batch"]
        if isinstance(value, dict) and ("type" in value or "event_type" in value):
            stamp, events, rank = None, [value], None
        elif isinstance(value, dict) and "events" in value:
            stamp, events, rank = value.get("ts"), value["events"], value.get("data_parallel_rank")
        elif isinstance(value, list) and len(value) >= 2 and isinstance(value[1], list):
            stamp, events, rank = value[0], value[1], value[2] if len(value) > 2 else None
        else:
            raise self.source.rejected(None, "no batch of KV events", "a batch is [ts, events, rank] or its map form")
        if rank is not None and (not isinstance(rank, int) or isinstance(rank, bool) or rank < 0):
            raise self.source.rejected("data_parallel_rank", f"{rank!r} is no rank", "a rank is a whole number")
        if not isinstance(events, list):
            raise self.source.rejected("events", f"{events!r:.40} is no list", "give the events of the batch")
        at_ns = None
        if stamp is not None:
            if isinstance(stamp, bool) or not isinstance(stamp, int | float | Decimal):
                raise self.source.rejected("ts", f"{stamp!r} is no time", "give it as seconds")
            at_ns = duration_ns(self.source, "ts", str(stamp), SECOND)
        return Batch(at_ns, rank, tuple(self._event(e, i) for i, e in enumerate(events)), sequence, raw)

    def _event(self, value: Any, number: int) -> KvEvent:
        where = f"events[{number}]"
        if isinstance(value, dict):
            fields = dict(value)
            tag = fields.pop("type", None) or fields.pop("event_type", None)
        elif isinstance(value, list) and value:
            tag, names = value[0], _POSITIONS.get(str(value[0]), ())
            fields = dict(zip(names, value[1:], strict=False))
            fields.update({f"position {i}": v for i, v in enumerate(value[1 + len(names) :], 1 + len(names))})
        else:
            raise self.source.rejected(where, "no KV event", "an event is [tag, ...] or a map with a type")
        if tag not in _POSITIONS:
            remedy = f"known are {', '.join(_POSITIONS)}"
            raise self.source.rejected(where, f"unknown tag {tag!r}", remedy)
        known = {name: fields.pop(name, None) for name in (*_POSITIONS[tag], "lora_path")}
        return self._typed(tag, known, where, len(fields))

    def _typed(self, tag: Tag, known: dict[str, Any], where: str, ignored: int) -> KvEvent:
        if tag == "AllBlocksCleared":
            return KvEvent(tag, ignored=ignored)
        listed = known["block_hashes"]
        if not isinstance(listed, list):
            raise self.source.rejected(f"{where}.block_hashes", f"{listed!r:.40} is no list", "give the block hashes")
        hashes = tuple(self._hash(h, f"{where}.block_hashes[{i}]") for i, h in enumerate(listed))
        if tag == "BlockRemoved":
            return KvEvent(tag, hashes, medium=known["medium"], ignored=ignored)
        parent = known["parent_block_hash"]
        size, tokens = known["block_size"], known["token_ids"] or None
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise self.source.rejected(f"{where}.block_size", f"{size!r} is no size", "give the tokens of a block")
        if tokens is not None:
            self._check_tokens(tokens, len(hashes) * size, where)
        lora = known["lora_name"] if known["lora_name"] is not None else known["lora_id"]
        return KvEvent(
            tag,
            hashes,
            None if parent is None else self._hash(parent, f"{where}.parent_block_hash"),
            tokens,
            size,
            None if lora is None else str(lora),
            known["medium"],
            ignored,
        )

    def _check_tokens(self, tokens: Any, wanted: int, where: str) -> None:
        for i, token in enumerate(tokens):
            if type(token) is not int or not 0 <= token < 2**31:
                raise self.source.rejected(f"{where}.token_ids[{i}]", f"{token!r:.40} is no token id", "ids are i32")
        if len(tokens) != wanted:
            what = f"{len(tokens)} tokens for {wanted} of its blocks"
            raise self.source.rejected(f"{where}.token_ids", what, "blocks are stored whole")

    def _hash(self, value: Any, where: str) -> int:
        if isinstance(value, dict) and value.keys() == {"hex"}:
            value = value["hex"]
        if isinstance(value, str):
            try:
                value = bytes.fromhex(value)
            except ValueError:
                raise self.source.rejected(where, f"{value!r:.40} is no hash", _ID_REMEDY) from None
        if isinstance(value, bytes):
            return self._short(value, where)
        if type(value) is not int or not 0 <= value <= U64_MAX:
            raise self.source.rejected(where, f"{value!r:.40} is no hash", _ID_REMEDY)
        return value

    def _short(self, value: bytes, where: str) -> int:
        if len(value) < _HASH_BYTES:
            raise self.source.rejected(where, f"a hash of {len(value)} bytes", _ID_REMEDY)
        short = int.from_bytes(value[:_HASH_BYTES])
        if self._whole.setdefault(short, value) != value:
            raise self.source.rejected(where, "two hashes agree in their first 8 bytes", "import them apart")
        return short


def is_framed(head: bytes) -> bool:
    """Whether a file begins with a frame: a header, then a MessagePack array or map of that length."""
    if len(head) < _HEADER.size + 1 or head[:1] in b"{[":
        return False
    _, length = _HEADER.unpack_from(head)
    kind = head[_HEADER.size]
    return 1 < length < 2**28 and (0x90 <= kind <= 0x9F or 0x80 <= kind <= 0x8F)


def frames(source: Source, unpacker: Unpacker) -> Iterator[Batch]:
    """The batches of a framed file; `source.line` counts them from 1."""
    data = source.read()
    at = 0
    while at < len(data):
        source.line += 1
        if at + _HEADER.size > len(data):
            raise source.rejected(None, "the file ends inside a frame's header", "fetch the file again")
        sequence, length = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        raw = data[at : at + length]
        if len(raw) < length:
            raise source.rejected(None, f"the frame has {len(raw)} of {length} bytes", "fetch the file again")
        at += length
        try:
            value = msgspec.msgpack.decode(raw)
        except (msgspec.DecodeError, RecursionError) as err:
            raise source.rejected(None, f"no MessagePack ({err})", "fetch the file again") from None
        yield unpacker.batch(value, sequence, raw)


def json_batches(source: Source, unpacker: Unpacker) -> Iterator[Batch]:
    """The batches of a JSON lines file, or of one JSON value over many lines."""
    for line in source.lines():
        value = refuse_repeated_keys(source, line, decimals=True)
        sequence = value.get("sequence") if isinstance(value, dict) else None
        yield unpacker.batch(value, sequence, line)
