"""What the capacity room's model shape leaves out of a GGUF header: tensor types, end tokens, kind of tokenizer.

A scan of its own, because it takes milliseconds where the general reader takes seconds on a large vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtape.backends.errors import UsageError

__all__ = ["GgufHeader", "scan_header"]

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """`tensor_types`: their GGML names. `end_tokens`: ids that end a turn or a text. `tokenizer`: gpt2, llama, ..."""

    tensor_types: frozenset[str]
    end_tokens: frozenset[int]
    tokenizer: str


def scan_header(path: Path) -> GgufHeader:
    """Raises UsageError when the header is cut short or not GGUF version 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Scan(data).header()
    except (OSError, struct.error, UnicodeDecodeError, ValueError) as err:
        raise UsageError(f"{path}: damaged GGUF header ({err})") from None


class _Scan:
    def __init__(self, data: Any) -> None:
        self._data = data
        self._at = 0

    def header(self) -> GgufHeader:
        magic, version = self._data[:4], struct.unpack_from("<I", self._data, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError(f"magic {magic!r}, version {version}")
        self._at = 8
        n_tensors, n_values = self._scalar(10), self._scalar(10)
        values: dict[str, Any] = {}
        for _ in range(n_values):
            key = self._string()
            values[key] = self._value(self._scalar(4))
        types = {self._tensor_type() for _ in range(n_tensors)}
        ends = {values.get(key) for key in _END_KEYS}
        return GgufHeader(
            frozenset(_type_name(t) for t in types),
            frozenset(int(t) for t in ends if t is not None),
            str(values.get("tokenizer.ggml.model", "")),
        )

    def _scalar(self, kind: int) -> Any:
        layout = _SCALARS[kind]
        (value,) = struct.unpack_from(layout, self._data, self._at)
        self._at += struct.calcsize(layout)
        return value

    def _string(self) -> str:
        length = self._scalar(10)
        self._at += length
        if self._at > len(self._data):
            raise ValueError("it ends inside a string")
        return bytes(self._data[self._at - length : self._at]).decode("utf-8", errors="replace")

    def _value(self, kind: int) -> Any:
        """A scalar or a string; arrays are skipped."""
        if kind == _STRING:
            return self._string()
        if kind in _SCALARS:
            return self._scalar(kind)
        if kind != _ARRAY:
            raise ValueError(f"unknown value type {kind}")
        item, count = self._scalar(4), self._scalar(10)
        if item in _SCALARS:
            self._at += count * struct.calcsize(_SCALARS[item])
        else:
            for _ in range(count):
                self._value(item)
        return None

    def _tensor_type(self) -> int:
        self._string()
        n_dims = self._scalar(4)
        self._at += 8 * n_dims
        kind = int(self._scalar(4))
        self._scalar(10)
        return kind


def _type_name(kind: int) -> str:
    import gguf

    try:
        return str(gguf.GGMLQuantizationType(kind).name)
    except ValueError:
        return f"type {kind}"
