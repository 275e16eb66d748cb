"""Files whose tensors do not fit the model, or hold no numbers: one line that names the tensor, never a forward."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import parse_engine
from kvtape.backends.reference.errors import BackendFailure, ModelUnsupported
from kvtape.backends.reference.model.weights import Weights
from support.llama_tiny import model_file
from support.reference import SHAPES, text
from support.rewritten_gguf import Tensors, rewrite_gguf


def _tensors(shape: str) -> dict[str, tuple[int, ...]]:
    """By name, sizes as NumPy has them."""
    reader = gguf.GGUFReader(str(model_file(**SHAPES[shape])))
    return {t.name: tuple(int(n) for n in reversed(t.shape)) for t in reader.tensors}


def _with(tmp_path: Path, shape: str, more: Tensors) -> Path:
    return rewrite_gguf(model_file(**SHAPES[shape]), tmp_path / "damaged.gguf", more=more)


def _kinds() -> list[tuple[str, str]]:
    """A model and a tensor of it, for every kind of tensor that there is."""
    found: dict[str, tuple[str, str]] = {}
    for shape in ("qwen2moe", "qwen2", "qwen3", "gemma2"):
        for name in _tensors(shape):
            found.setdefault(
                name.partition(".")[2].lstrip("0123456789") if name.startswith("blk.") else name, (shape, name)
            )
    return list(found.values())


@pytest.mark.parametrize(("shape", "name"), _kinds())
def test_a_tensor_of_another_size_is_refused_by_name(tmp_path: Path, shape: str, name: str) -> None:
    """Each dimension one longer, and a single number, which would be spread over a row."""
    sizes = _tensors(shape)[name]
    others = [(*sizes[:i], n + 1, *sizes[i + 1 :]) for i, n in enumerate(sizes)]
    for other in [*others, (1,) * len(sizes), (*sizes, 2)]:
        path = _with(tmp_path, shape, {name: np.ones(other, np.float32)})
        # Where a size is free (that of the feed-forward), it is the others of the layer that do not fit.
        with pytest.raises(ModelUnsupported, match=r"damaged\.gguf: \S+\.(weight|bias) is \d+(x\d+)*, and a model of"):
            Weights(path)


def test_a_vector_may_be_written_as_a_matrix_of_one_row(tmp_path: Path) -> None:
    name = "blk.0.ffn_gate_inp_shexp.weight"
    (n,) = _tensors("qwen2moe")[name]
    Weights(_with(tmp_path, "qwen2moe", {name: np.ones((1, n), np.float32)}))


@pytest.mark.parametrize("name", ["blk.1.ffn_norm.weight", "blk.0.attn_v.weight", "output.weight"])
def test_weights_that_are_no_numbers_are_an_error_and_no_text(tmp_path: Path, name: str) -> None:
    values = np.full(_tensors("llama")[name], np.nan, np.float32)
    harness = Harness(parse_engine("standard"), Weights(_with(tmp_path, "llama", {name: values})))
    with pytest.raises(BackendFailure, match=r"damaged\.gguf: the model gave logits that are no numbers"):
        harness.begin(text(5))
