"""A GGUF's weights as float32 arrays, dequantised where they are used: one layer at a time fits any memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import KvtapeError
from kvtape.capacity.gguf_file import open_gguf
from kvtape.capacity.model import ModelShape, read_model
from kvtape.replay.findings import Storage

__all__ = ["ModelNotCovered", "Weights"]

Floats = npt.NDArray[np.float32]
_ARCHS = ("llama", "qwen2", "qwen3")


class ModelNotCovered(KvtapeError):
    """The numpy forward does not know this kind of model; the message says what stands in the way."""


class Weights:
    """The tensors of one file by GGUF name. Raises ModelFileError, ModelNotCovered.

    Covered: llama, qwen2, qwen3 decoders with plain RoPE, one full-attention cache, dense feed-forward layers.
    """

    def __init__(self, path: str | Path) -> None:
        import gguf

        self.shape: ModelShape = read_model(path)
        self._gguf: Any = gguf
        self._tensors: dict[str, Any] = {t.name: t for t in open_gguf(path).tensors}
        obstacle = self._obstacle()
        if obstacle:
            raise ModelNotCovered(f"{Path(path).name}: {obstacle}")

    def has(self, name: str) -> bool:
        return name in self._tensors

    def storage(self, *names: str) -> Storage:
        """The coarsest storage among these tensors."""
        types = {self._tensors[n].tensor_type.name for n in names}
        if types <= {"F32"}:
            return "f32"
        return "half" if types <= {"F32", "F16", "BF16"} else "quantised"

    def tensor(self, name: str) -> Floats:
        """A whole tensor, `[out, in]` for a matrix, `[n]` for a vector."""
        return self._dequantise(self._tensors[name], self._tensors[name].data)

    def optional(self, name: str) -> Floats | None:
        return self.tensor(name) if self.has(name) else None

    def n_rows(self, name: str) -> int:
        return len(self._tensors[name].data)

    def rows(self, name: str, start: int, stop: int) -> Floats:
        """Rows `[start, stop)` of a matrix."""
        return self._dequantise(self._tensors[name], self._tensors[name].data[start:stop])

    def embed(self, tokens: npt.NDArray[np.int64]) -> Floats:
        """Embedding rows `[n, n_embd]` of token ids `[n]`; each distinct token is dequantised once."""
        tensor = self._tensors["token_embd.weight"]
        distinct, where = np.unique(tokens, return_inverse=True)
        return self._dequantise(tensor, tensor.data[distinct])[where]

    @property
    def head(self) -> str:
        """Name of the matrix that makes logits: the embedding itself where the model ties them."""
        return "output.weight" if self.has("output.weight") else "token_embd.weight"

    def _dequantise(self, tensor: Any, data: Any) -> Floats:
        return np.asarray(self._gguf.dequantize(np.ascontiguousarray(data), tensor.tensor_type), np.float32)

    def _obstacle(self) -> str | None:
        shape = self.shape
        if shape.arch not in _ARCHS:
            return f"architecture {shape.arch}; the numpy reference knows {', '.join(_ARCHS)}"
        if shape.rope_scaling not in ("none", "") or self.has("rope_freqs.weight"):
            return f"RoPE scaling {shape.rope_scaling}; the numpy reference knows plain RoPE"
        if shape.sliding_window:
            return f"a sliding window of {shape.sliding_window}; the numpy reference knows full attention"
        if not self.has("blk.0.ffn_gate.weight"):
            return "no dense feed-forward layer"
        return None
