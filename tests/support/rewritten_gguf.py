"""A GGUF written anew with other keys, other tensors, or its tensors in another storage type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

__all__ = ["rewrite_gguf"]

Tensors = Mapping[str, npt.NDArray[Any]]


def rewrite_gguf(
    source: Path,
    target: Path,
    *,
    storage: str | None = None,
    keys: Callable[[gguf.GGUFWriter], None] | None = None,
    more: Tensors | None = None,
) -> Path:
    """`target`, with every key and tensor of `source`.

    `storage` f32 or f16: matrices are dequantised and stored so; None keeps them as they are. `keys` adds keys, `more`
    tensors, which take the place of those of the same name.
    """
    reader = gguf.GGUFReader(str(source))
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, arch)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    if keys is not None:
        keys(writer)
    for tensor in reader.tensors:
        if tensor.name not in (more or {}):
            _add(writer, tensor, storage)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add(writer: gguf.GGUFWriter, tensor: Any, storage: str | None) -> None:
    if storage is None:
        writer.add_tensor(tensor.name, np.array(tensor.data), raw_dtype=tensor.tensor_type)
        return
    values = gguf.dequantize(np.ascontiguousarray(tensor.data), tensor.tensor_type)
    is_matrix = values.ndim > 1
    writer.add_tensor(tensor.name, values.astype(np.float16 if storage == "f16" and is_matrix else np.float32))
