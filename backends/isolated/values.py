"""Values of the backend protocol as JSON text beside raw buffers, and back.

Not pickle: an engine that has damaged its host's memory may make the host send anything, and what arrives must not be
able to run code in the process that isolation protects. Only the types listed here come out. Arrays and bytes travel
beside the text, uncopied on the way out and read in place on the way in.

    text                                 value
    null true 3 2.5 "a" [..]             None, bool, int, float, str, list
    {"tuple": [..]} {"set": [..]}        tuple, frozenset
    {"dict": [[key, value], ..]}         dict
    {"bytes": i}                         buffer i
    {"array": [i, dtype, shape]}         buffer i as numbers, C order
    {"number": [dtype, value]}           one NumPy number
    {"ranges": [[start, stop], ..]}      RangeSet
    {"fatal": "device_lost"}             FatalClass
    {"record": [name, {field: value}]}   one of the protocol's dataclasses
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import FatalClass
from kvtape.backends.isolated.opened import Opened
from kvtape.backends.protocol import (
    AttentionMass,
    Computed,
    DecodeRun,
    KvRows,
    ModelFacts,
    SessionConfig,
    Witness,
)
from kvtape.backends.verifying import Verified
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.layout import Segment
from kvtape.planner.ranges import RangeSet

__all__ = ["RECORDS", "Unsendable", "WireError", "decode", "encode", "wire_version"]

RECORDS: Final = {
    cls.__name__: cls
    for cls in (
        AttentionMass,
        Capabilities,
        Computed,
        DecodeRun,
        KvRows,
        ModelFacts,
        Opened,
        Segment,
        SessionConfig,
        Verified,
        Witness,
    )
}
_PLAIN: Final = (bool, int, float, str, type(None))
_KINDS: Final = "biuf"


class Unsendable(TypeError):
    """A value that the protocol has no place for."""


class WireError(Exception):
    """What arrived is not what the other side could have sent."""


def wire_version() -> str:
    """The same in two processes exactly if they mean the same by every record."""
    names = sorted((name, [f.name for f in dataclasses.fields(cls)]) for name, cls in RECORDS.items())
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def encode(value: object) -> tuple[bytes, list[memoryview]]:
    """Text and buffers of `value`. Raises Unsendable. The buffers are views: send them before anything changes."""
    buffers: list[memoryview] = []
    return json.dumps(_pack(value, buffers), separators=(",", ":")).encode("ascii"), buffers


def decode(text: bytes, buffers: Sequence[bytearray]) -> Any:
    """The value again; arrays share the memory of their buffers. Raises WireError."""
    try:
        return _unpack(json.loads(text), buffers)
    except Exception as err:  # damage may break any step
        raise WireError(f"unreadable: {type(err).__name__}: {err}") from None


def _pack(value: object, buffers: list[memoryview]) -> object:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, FatalClass):
        return {"fatal": str(value)}
    if isinstance(value, np.ndarray):
        return _pack_array(value, buffers)
    if isinstance(value, bytes | bytearray | memoryview):
        buffers.append(memoryview(value).cast("B"))
        return {"bytes": len(buffers) - 1}
    if isinstance(value, np.generic) and value.dtype.kind in _KINDS:
        return {"number": [value.dtype.str, value.item()]}
    if isinstance(value, RangeSet):
        return {"ranges": value.as_pairs()}
    if dataclasses.is_dataclass(value) and type(value) is RECORDS.get(type(value).__name__):
        fields = {f.name: _pack(getattr(value, f.name), buffers) for f in dataclasses.fields(value)}
        return {"record": [type(value).__name__, fields]}
    return _pack_container(value, buffers)


def _pack_container(value: object, buffers: list[memoryview]) -> object:
    if isinstance(value, tuple):
        return {"tuple": [_pack(v, buffers) for v in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_pack(k, buffers), _pack(v, buffers)] for k, v in value.items()]}
    if isinstance(value, frozenset | set):
        return {"set": sorted(_pack(v, buffers) for v in value)}  # type: ignore[type-var]
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [v if type(v) is int else _pack(v, buffers) for v in value]
    raise Unsendable(f"{type(value).__name__} {value!r:.80} cannot be handed to an engine in another process")


def _pack_array(value: npt.NDArray[Any], buffers: list[memoryview]) -> object:
    if value.dtype.kind not in _KINDS:
        raise Unsendable(f"an array of {value.dtype} cannot be handed to an engine in another process")
    buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return {"array": [len(buffers) - 1, value.dtype.str, list(value.shape)]}


def _unpack(value: Any, buffers: Sequence[bytearray]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, list):
        return [v if type(v) is int else _unpack(v, buffers) for v in value]
    ((tag, body),) = value.items()
    match tag:
        case "tuple":
            return tuple(_unpack(v, buffers) for v in body)
        case "dict":
            return {_unpack(k, buffers): _unpack(v, buffers) for k, v in body}
        case "set":
            return frozenset(_unpack(v, buffers) for v in body)
        case "bytes":
            return bytes(buffers[body])
        case "array":
            index, dtype, shape = body
            return _unpack_array(buffers[index], dtype, shape)
        case "number":
            return _dtype(body[0]).type(body[1])
        case "ranges":
            return RangeSet([(start, stop) for start, stop in body])
        case "fatal":
            return FatalClass(body)
        case "record":
            return RECORDS[body[0]](**{k: _unpack(v, buffers) for k, v in body[1].items()})
    raise ValueError(f"unknown tag {tag!r}")


def _unpack_array(buffer: bytearray, dtype: str, shape: list[int]) -> npt.NDArray[Any]:
    kind = _dtype(dtype)
    if min(shape, default=0) < 0 or math.prod(shape) * kind.itemsize != len(buffer):
        raise ValueError(f"{len(buffer)} bytes for an array of {dtype} {shape}")
    return np.frombuffer(buffer, kind).reshape(shape)


def _dtype(text: str) -> np.dtype[Any]:
    dtype = np.dtype(text)
    if dtype.kind not in _KINDS:
        raise ValueError(f"no numbers: {text!r}")
    return dtype
