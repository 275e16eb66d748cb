"""A frame: the state that one chunk of tokens added to a session, in a form that can leave the process.

Frames of a session are a chain: each carries the digest of the one before, so that a missing, repeated, swapped or
foreign frame is noticed before a row of it is used. As bytes a frame stands in the envelope of `backends.envelope`,
which has a checksum of its own.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import StateRejected
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.tokens import Ids
from kvtape.backends.reference.model.weights import Weights

__all__ = ["BoundaryFrame", "check_chain"]

_KIND = "boundary frame 1"


@dataclass(frozen=True, slots=True)
class BoundaryFrame:
    """Chunk `index` of a session: positions `[start, start + n)`, n = the number of `tokens`.

    `hidden` `[1, n_embd]`: its last row behind the last layer, from which the next token is chosen. `keys`
    `[n_layer, n, n_head_kv, head_dim_k]`, rotated; `values` alike. `model`: the fingerprint of the weights' file.
    `previous`: the digest of the frame before, empty for the first.
    """

    model: str
    index: int
    start: int
    tokens: Ids
    hidden: Floats
    keys: Floats
    values: Floats
    previous: str = ""

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._arrays)

    @property
    def digest(self) -> str:
        """Of all that the frame says, 32 hex digits."""
        state = hashlib.blake2b(json.dumps(self._header).encode(), digest_size=16)
        for part in self._arrays:
            state.update(_little(part).data)
        return state.hexdigest()

    def to_bytes(self) -> bytes:
        return wrap(self._header, b"".join(_little(part).tobytes() for part in self._arrays))

    @classmethod
    def from_bytes(cls, data: bytes) -> BoundaryFrame:
        """Raises StateRejected for bytes that are no frame, or a damaged one."""
        header, payload = unwrap(data, {"kind": _KIND})
        try:
            tokens, hidden, keys, values = _arrays_of(header, payload)
            model, index, start, previous = (header[name] for name in ("model", "index", "start", "previous"))
        except (KeyError, TypeError, ValueError) as err:
            raise StateRejected(f"a boundary frame that cannot be read: {err}") from None
        return cls(model, index, start, tokens, hidden, keys, values, previous)

    @property
    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.tokens, self.hidden, self.keys, self.values

    @property
    def _header(self) -> dict[str, Any]:
        return {
            "kind": _KIND,
            "model": self.model,
            "index": self.index,
            "start": self.start,
            "previous": self.previous,
            "dtype": self.keys.dtype.name,
            "shapes": [part.shape for part in self._arrays],
        }


def check_chain(frames: Sequence[BoundaryFrame], weights: Weights) -> None:
    """Raises StateRejected unless `frames` are a session of these weights from its first token on, in order."""
    shape, dtype = weights.architecture.shape, weights.dtype
    rows = (shape.n_layer, shape.n_head_kv, shape.head_dim_k, shape.head_dim_v)
    previous, stop = "", 0
    for i, frame in enumerate(frames):
        if frame.model != shape.fingerprint:
            raise StateRejected(f"frame {i} is of another model ({frame.model[:40]}), not of {weights.path}")
        if frame.keys.dtype != dtype:
            raise StateRejected(f"frame {i} holds {frame.keys.dtype} rows, these weights compute in {dtype}")
        if (frame.index, frame.start, frame.previous) != (i, stop, previous):
            raise StateRejected(
                f"frame {i} does not follow the one before: one is missing, repeated or of another session"
            )
        n_layer, n, n_kv, dim_k = frame.keys.shape
        if (n_layer, n_kv, dim_k, frame.values.shape[-1]) != rows or n != len(frame.tokens):
            raise StateRejected(f"frame {i} holds rows of {frame.keys.shape} for {len(frame.tokens)} tokens")
        previous, stop = frame.digest, frame.stop


def _little(part: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.ascontiguousarray(part, part.dtype.newbyteorder("<"))


def _arrays_of(header: Mapping[str, Any], payload: bytes) -> list[npt.NDArray[Any]]:
    if header["dtype"] not in ("float32", "float64"):
        raise ValueError(f"rows of {header['dtype']}")
    kinds = [np.dtype(np.int32), *[np.dtype(header["dtype"])] * 3]
    arrays: list[npt.NDArray[Any]] = []
    at = 0
    for kind, shape in zip(kinds, header["shapes"], strict=True):
        n = math.prod(shape)
        arrays.append(np.frombuffer(payload, kind.newbyteorder("<"), n, at).reshape(shape).astype(kind))
        at += n * kind.itemsize
    if at != len(payload):
        raise ValueError(f"{len(payload)} bytes for {at} of rows")
    return arrays
