"""A model's metadata as a flat map of GGUF keys, from a GGUF file or a JSON file, read with types that are checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.gguf_file import open_gguf

__all__ = ["Metadata", "metadata_from_gguf", "metadata_from_json", "metadata_of"]

_LARGEST: Final = 2**63
"""No size of a model comes near; what does is damage, and would only overflow later."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """Values by GGUF key; keys given to the methods lack the architecture's prefix. `source` is named in errors."""

    values: Mapping[str, Any]
    source: str

    @property
    def arch(self) -> str:
        """`general.architecture`. Raises ModelFileError where it is missing."""
        arch = self.values.get("general.architecture")
        if not isinstance(arch, str) or not arch:
            raise ModelFileError(f"{self.source}: general.architecture is missing; the keys of a GGUF model are needed")
        return arch

    def has(self, key: str) -> bool:
        return f"{self.arch}.{key}" in self.values

    def get(self, key: str) -> Any:
        """The raw value; None where the key is missing."""
        return self.values.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A scalar >= 0. Raises ModelFileError where it is missing without a default, or something else."""
        value = self.get(key)
        if value is None:
            if default is None:
                raise ModelFileError(f"{self.source}: {self.arch}.{key} is missing; a decoder's metadata has it")
            return default
        if isinstance(value, bool):  # in a list they are flags, one a layer
            raise self._not_whole(key, value)
        return self._whole(key, value)

    def per_layer(self, key: str, n_layers: int, default: int | None = None) -> tuple[int, ...]:
        """A value for each layer: a scalar counts for all, an array has one entry for each. Raises ModelFileError."""
        value = self.get(key)
        if not isinstance(value, list | tuple):
            return (self.integer(key, default),) * n_layers
        if len(value) != n_layers:
            raise ModelFileError(
                f"{self.source}: {self.arch}.{key} has {len(value)} entries for {n_layers} layers; the file is damaged"
            )
        return tuple(self._whole(key, entry) for entry in value)

    def _whole(self, key: str, value: Any) -> int:
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        number = int(value) if whole else -1
        if not 0 <= number < _LARGEST:
            raise self._not_whole(key, value)
        return number

    def _not_whole(self, key: str, value: Any) -> ModelFileError:
        return ModelFileError(f"{self.source}: {self.arch}.{key} is {value!r}; a whole number from 0 on is needed")


def metadata_from_gguf(path: str | Path) -> tuple[Metadata, int]:
    """The metadata of a GGUF without its vocabulary, and the bytes of its tensors. Raises ModelFileError."""
    reader = open_gguf(path)
    return metadata_of(reader, str(path)), sum(int(tensor.n_bytes) for tensor in reader.tensors)


def metadata_of(reader: Any, source: str) -> Metadata:
    """The same of a reader that is open already. Raises ModelFileError for texts that are not UTF-8."""
    try:
        values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("tokenizer.")}
    except UnicodeDecodeError as err:
        raise ModelFileError(f"{source}: damaged GGUF ({err}); copy or download it again") from None
    return Metadata(values, source)


def metadata_from_json(path: str | Path) -> Metadata:
    """A JSON object of GGUF keys, values as in the file. Raises ModelFileError for anything else."""
    file = Path(path)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelFileError(f"{file}: no such metadata file; give a JSON map of GGUF keys") from None
    except (ValueError, RecursionError) as err:  # not UTF-8, not JSON, a number of thousands of digits, too deep
        raise ModelFileError(f"{file}: not JSON ({err}); give a flat map of GGUF keys") from None
    if not isinstance(values, dict) or not all(_is_flat(value) for value in values.values()):
        raise ModelFileError(
            f"{file}: not a flat map of GGUF keys to numbers, texts and lists of them"
            '; write it as {"llama.block_count": 32, ...}'
        )
    return Metadata(values, str(file))


def _is_flat(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(entry, str | int | float | bool) for entry in value)
    return value is None or isinstance(value, str | int | float | bool)
