"""Rows rounded as engines round them, held against the gguf library's blocks and against llama.cpp itself."""

from __future__ import annotations

import gguf
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.reference.model.activations import rounded_block, rounded_rows
from kvtape.backends.reference.model.forward import forward
from kvtape.backends.reference.model.steps import embed, qkv
from kvtape.backends.reference.model.weights import Weights
from kvtape.cli.models import demo_model
from support.engines import load_engine, open_f32
from support.llama_tiny import model_file

TYPES = gguf.GGMLQuantizationType


def rows(seed: int, n: int = 4, width: int = 512) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=(n, width)) * np.exp(np.random.default_rng(seed + 1).normal())
    return values.astype(np.float32)


@given(st.integers(0, 2**20))
def test_blocks_are_those_of_q8_0(seed: int) -> None:
    """The library keeps the scale in 11 bits; a number at the middle of two multiples may go either way."""
    x = rows(seed)
    known = gguf.quants.dequantize(gguf.quants.quantize(x, TYPES.Q8_0), TYPES.Q8_0)
    scale = np.repeat(np.abs(x.reshape(4, -1, 32)).max(axis=2) / 127, 32, axis=1)
    off = np.abs(rounded_rows(x, 32) - known)
    assert (off <= 1.001 * scale).all()
    assert (off <= 0.07 * scale).mean() > 0.99


@given(st.integers(0, 2**20), st.sampled_from([32, 256]), st.sampled_from([1.0, 1.02, 1.06]))
def test_no_number_moves_by_more_than_half_a_step(seed: int, block: int, step: float) -> None:
    x = rows(seed)
    x[1, :block] = 0
    rounded = rounded_rows(x, block, step)
    scale = np.repeat(step * np.abs(x.reshape(4, -1, block)).max(axis=2) / 127, block, axis=1)
    assert rounded.dtype == np.float32
    assert not rounded[1, :block].any()
    assert (np.abs(rounded - x) <= 0.501 * scale).all()
    assert not np.array_equal(rounded, x)
    np.testing.assert_array_equal(rounded_rows(x[2:3], block, step)[0], rounded[2])


def test_rows_are_rounded_where_a_matrix_is_packed() -> None:
    assert [rounded_block(t) for t in (TYPES.F32, TYPES.F16, TYPES.BF16)] == [0, 0, 0]
    assert [rounded_block(t) for t in (TYPES.Q4_1, TYPES.Q8_0, TYPES.IQ4_NL, TYPES.Q4_K)] == [32, 32, 32, 256]
    for storage, rounds in (("f32", False), ("f16", False), ("q4_0", True)):
        path = model_file("llama", weights=storage)
        model, plain = Weights(path, packed=True, step=1.0), Weights(path, packed=True)
        assert (model.rounds, plain.rounds) == (rounds, False)
        assert np.array_equal(forward(model, [5, 6, 7]), forward(plain, [5, 6, 7])) is not rounds


def test_llama_rounds_as_the_reference_does() -> None:
    """In layer 0, where roundings have not yet met roundings, this is nine tenths of what is between the two."""
    path = demo_model()
    engine = load_engine("llama", path)
    backend = open_f32(engine)
    tokens = list(range(300, 332))
    backend.prefill(tokens, 0)
    witness = backend.witness()
    backend.close()
    engine.close()
    order = np.argsort(witness.cache_positions)
    stored = [part[0][order] for part in (witness.rows.keys, witness.rows.values)]
    apart = {}
    for step in (None, 1.0, 1.02):
        model = Weights(path, packed=True, step=step)
        _, *ours = qkv(model, 0, embed(model, tokens), np.arange(len(tokens)))
        apart[step] = [float(np.linalg.norm(a.reshape(b.shape) - b)) for a, b in zip(ours, stored, strict=True)]
    for plain, rounded, elsewhere in zip(*(apart[step] for step in (None, 1.0, 1.02)), strict=True):
        assert rounded < plain / 5
        assert plain / 2 < elsewhere < 2 * plain, "as much noise, but another"
