"""Opening a GGUF file: the `gguf` library's reader, with arrays taken whole instead of element by element.

The library makes several NumPy views for every element of every array, which for the tokens and merges of a
vocabulary takes seconds. Nothing here reads such elements one by one: the array is one view over its bytes, and its
strings are only decoded when somebody asks for them. Everything else is the library's own parsing.
"""

from __future__ import annotations

import functools
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvtape.capacity.errors import ModelFileError

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = ["array_length", "open_gguf"]

_MAX_ARRAY = 2**32


def open_gguf(path: str | Path) -> GGUFReader:
    """The library's reader over a memory map; its fields and tensors have the values the plain reader gives.

    `fields[key].contents()` decodes; `parts` of an array hold all its elements in one part. Only pages of the header
    are read. Raises ModelFileError for a file that is missing, not a GGUF, cut or damaged.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelFileError(f"{file}: no such model file; give the path of a GGUF")
    with file.open("rb") as handle:
        if handle.read(4) != b"GGUF":
            raise ModelFileError(f"{file}: not a GGUF file (it does not begin with 'GGUF'); give the path of a GGUF")
    try:
        reader: GGUFReader = _reader_class()(str(file))
    except Exception as err:  # the library raises whatever NumPy or struct met in a damaged file
        raise ModelFileError(
            f"{file}: damaged GGUF ({type(err).__name__}: {err}); the file is cut short or corrupt, copy or download "
            "it again"
        ) from None
    return reader


def array_length(field: Any) -> int:
    """Elements of an array field of `open_gguf`'s reader."""
    return int(field.parts[-2][0])


@functools.cache
def _reader_class() -> Any:
    """Made on first use, so that importing this module does not import `gguf`."""
    import gguf
    import numpy as np
    from gguf.gguf_reader import ReaderField

    value_type = gguf.GGUFValueType

    class StringArrayField(ReaderField):
        """A field whose elements are strings in one part, decoded on demand."""

        __slots__ = ()

        def contents(self, index_or_slice: int | slice = slice(None)) -> Any:
            order = self.parts[-2].dtype.str[0]  # of the array's length, and so of its strings' lengths
            texts = [str(raw, encoding="utf-8") for raw in _strings(bytes(self.parts[-1]), order)]
            return texts[index_or_slice]

    class WholeArrayReader(gguf.GGUFReader):
        """`GGUFReader` that takes arrays of scalars and of strings as one part each."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if int(raw_type) != value_type.ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            item = value_type(int(self._get(orig_offs, np.uint32)[0]))
            if item == value_type.ARRAY:  # arrays of arrays are the library's own business
                return super()._get_field_parts(orig_offs, raw_type)
            start = orig_offs + 12
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            if count > _MAX_ARRAY:
                raise ValueError(f"an array claims {count} elements")
            head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            if item == value_type.STRING:
                elements = self.data[start : self._end_of_strings(start, count)]
            else:
                elements = self._get(start, self.gguf_scalar_to_np[item], count)
                if len(elements) != count:
                    raise ValueError(f"an array of {count} elements runs past the end of the file")
            # The library names the element's type only when there is an element.
            types = [value_type.ARRAY, item] if count else [value_type.ARRAY]
            return start + int(elements.nbytes) - orig_offs, [*head, elements], [2], types

        def _end_of_strings(self, start: int, count: int) -> int:
            """Offset behind `count` strings, each a little- or big-endian u64 length and its bytes."""
            order = "<" if self.endianess == gguf.GGUFEndian.LITTLE else ">"
            length_at = struct.Struct(f"{order}Q").unpack_from
            raw: Any = self.data
            data, at, end = memoryview(raw), start, len(raw)
            for _ in range(count):
                at += 8 + length_at(data, at)[0]
                if at > end:
                    raise ValueError("a string runs past the end of the file")
            return at

        def _push_field(self, field: Any, skip_sum: bool = False) -> int:
            if len(field.types) == 2 and field.types[1] == value_type.STRING:
                field = StringArrayField(*field)
            return int(super()._push_field(field, skip_sum))

    def _strings(raw: bytes, order: str) -> list[bytes]:
        texts, at = [], 0
        while at < len(raw):
            (length,) = struct.unpack_from(f"{order}Q", raw, at)
            texts.append(raw[at + 8 : at + 8 + length])
            at += 8 + length
        return texts

    return WholeArrayReader
