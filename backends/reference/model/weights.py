"""The weights of a GGUF (or of the folder of an OpenVINO model) by layer, over the mapped file.

A matrix is dequantised on its first use and kept; opened `packed`, every use dequantises tile by tile and keeps
nothing. Both give the same bits, because both multiply the same tiles (`linear`). Tensors that the forward does not use
are a reason to refuse the model: it would be another model without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.errors import ModelUnsupported
from kvtape.backends.reference.model.architecture import Architecture, read_architecture
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.feed_forward import Experts, FeedForward, Gated, Shared
from kvtape.backends.reference.model.ir_tensors import ir_tensors
from kvtape.backends.reference.model.linear import Projection
from kvtape.backends.reference.model.matrix import Matrix, dequantise, matrix_slices
from kvtape.backends.reference.model.tensor_shapes import shape_obstacle
from kvtape.capacity.gguf_file import open_gguf
from kvtape.capacity.metadata import Metadata, metadata_of
from kvtape.capacity.model import ModelShape, read_model

__all__ = ["LayerWeights", "PathReport", "Weights"]

_BLOCK: Final = re.compile(r"blk\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Vectors `[n]` in the float type of the model; None where the model has no such step."""

    attn_norm: Floats
    q: Projection
    k: Projection
    v: Projection
    attn_out: Projection
    q_norm: Floats | None
    k_norm: Floats | None
    post_attn_norm: Floats | None
    ffn_norm: Floats
    feed: FeedForward
    post_ffn_norm: Floats | None


@dataclass(frozen=True, slots=True)
class PathReport:
    """Which path ran. `matrices`: how many there are; `packed` of them are kept packed (f32 of a mapped file never is).

    `tiles_unpacked`: tiles dequantised for products so far. `resident_bytes`: float bytes held beside the mapped file.
    """

    matrices: int
    packed: int
    tiles_unpacked: int
    resident_bytes: int
    file_bytes: int

    @property
    def path(self) -> str:
        return "packed" if self.packed else "plain"


class Weights:
    """`dtype` float32, or float64 for an oracle's precision. `step`: of rounded rows, see `Matrix`; None is the truth.

    Raises ModelFileError, ModelUnsupported.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: npt.DTypeLike = np.float32,
        *,
        packed: bool = False,
        step: float | None = None,
    ) -> None:
        self.path = str(path)
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.float32, np.float64):
            raise ValueError(f"the reference computes in float32 or float64, not {self.dtype}")
        shape, tensors, meta = _opened(Path(path))
        self._tensors: dict[str, Any] = {t.name: t for t in tensors}
        self._read: set[str] = set()
        factors = self._vector("rope_freqs.weight")
        self.architecture: Architecture = read_architecture(shape, meta, factors)
        obstacle = shape_obstacle(tensors, shape)
        if obstacle:
            raise ModelUnsupported(f"{self.path}: {obstacle}; convert the model again")
        self._matrices: dict[str, Matrix] = {}
        self._asked_packed, self._step = packed, step
        self.embedding = self._matrix("token_embd.weight")
        self.output_norm = self._needed("output_norm.weight")
        self.head = Projection(self._matrix("output.weight") if "output.weight" in self._tensors else self.embedding)
        self.layers = tuple(self._layer(i) for i in range(shape.n_layer))
        self._refuse(sorted(set(self._tensors) - self._read))

    @property
    def n_vocab(self) -> int:
        return self.embedding.n_out

    @property
    def rounds(self) -> bool:
        """Whether there is a matrix that rows are rounded for."""
        return any(matrix.block for matrix in self._matrices.values())

    @property
    def float_bytes(self) -> int:
        """Bytes held beside the mapped file once every matrix was used."""
        return sum(matrix.float_bytes for matrix in self._matrices.values())

    def report(self) -> PathReport:
        matrices = self._matrices.values()
        return PathReport(
            matrices=len(matrices),
            packed=sum(m.packed for m in matrices),
            tiles_unpacked=sum(m.tiles_unpacked for m in matrices),
            resident_bytes=sum(m.resident_bytes for m in matrices),
            file_bytes=sum(m.file_bytes for m in matrices),
        )

    def _layer(self, i: int) -> LayerWeights:
        def at(name: str) -> str:
            return f"blk.{i}.{name}"

        return LayerWeights(
            attn_norm=self._needed(at("attn_norm.weight")),
            q=self._projection(at("attn_q")),
            k=self._projection(at("attn_k")),
            v=self._projection(at("attn_v")),
            attn_out=self._projection(at("attn_output")),
            q_norm=self._vector(at("attn_q_norm.weight")),
            k_norm=self._vector(at("attn_k_norm.weight")),
            post_attn_norm=self._vector(at("post_attention_norm.weight")),
            ffn_norm=self._needed(at("ffn_norm.weight")),
            feed=self._experts(at) if self.architecture.n_expert_used else self._gated(at, ""),
            post_ffn_norm=self._vector(at("post_ffw_norm.weight")),
        )

    def _gated(self, at: Callable[[str], str], kind: str) -> Gated:
        parts = (self._projection(at(f"ffn_{part}{kind}")) for part in ("gate", "up", "down"))
        return Gated(*parts)

    def _experts(self, at: Callable[[str], str]) -> Experts:
        """Each expert's matrices are slices of the three tensors that hold all of them."""
        gate, up, down = (self._stack(at(f"ffn_{part}_exps.weight")) for part in ("gate", "up", "down"))
        arch, shared = self.architecture, None
        if arch.shared_expert:
            shared = Shared(self._gated(at, "_shexp"), self._needed(at("ffn_gate_inp_shexp.weight")))
        return Experts(
            router=self._projection(at("ffn_gate_inp")),
            gated=tuple(
                Gated(Projection(g), Projection(u), Projection(d)) for g, u, d in zip(gate, up, down, strict=True)
            ),
            n_used=arch.n_expert_used,
            normalised=arch.normalised_shares,
            shared=shared,
        )

    def _stack(self, name: str) -> list[Matrix]:
        slices = matrix_slices(self._tensor(name))
        matrices = [Matrix(part, self.dtype, packed=self._asked_packed, step=self._step) for part in slices]
        self._matrices.update({matrix.name: matrix for matrix in matrices})
        return matrices

    def _projection(self, name: str) -> Projection:
        return Projection(self._matrix(f"{name}.weight"), self._vector(f"{name}.bias"))

    def _matrix(self, name: str) -> Matrix:
        if name not in self._matrices:
            self._matrices[name] = Matrix(self._tensor(name), self.dtype, packed=self._asked_packed, step=self._step)
        return self._matrices[name]

    def _vector(self, name: str) -> Floats | None:
        return self._needed(name) if name in self._tensors else None

    def _needed(self, name: str) -> Floats:
        tensor = self._tensor(name)
        return dequantise(tensor, tensor.data, self.dtype)

    def _tensor(self, name: str) -> Any:
        if name not in self._tensors:
            raise ModelUnsupported(f"{self.path}: there is no tensor {name}; the reference needs it")
        self._read.add(name)
        return self._tensors[name]

    def _refuse(self, unused: Iterable[str]) -> None:
        names = list(unused)
        if names:
            kinds = sorted({_BLOCK.sub(r"blk.*.\2", name) for name in names})
            raise ModelUnsupported(f"{self.path}: the reference has no use for {', '.join(kinds[:8])}")


def _opened(path: Path) -> tuple[ModelShape, Sequence[Any], Metadata]:
    """Shape, tensors and metadata of a GGUF, or of the folder of an OpenVINO model in the terms of one."""
    shape = read_model(path)
    if not path.is_dir():
        reader = open_gguf(path)
        return shape, reader.tensors, metadata_of(reader, str(path))
    if not shape.rope_frequencies:
        raise ModelUnsupported(
            f"{path}: how its graph rotates keys is not written in it as numbers; give the GGUF of the model"
        )
    # What graphs of this structure do is what a GGUF of architecture llama says, with biases and head norms or not.
    plain = replace(shape, arch="llama")
    return plain, ir_tensors(path, shape.n_embd), Metadata({"general.architecture": "llama"}, str(path))
