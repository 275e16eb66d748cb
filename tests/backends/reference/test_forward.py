"""The forward against llama.cpp, against the float64 oracle, and what it shows of itself."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvtape.backends.protocol import SessionConfig
from kvtape.backends.reference.errors import EmptyPrompt, ModelUnsupported
from kvtape.backends.reference.model.attention import AttentionBlock
from kvtape.backends.reference.model.dispatch import NewRows, logits_of
from kvtape.backends.reference.model.forward import LayerHooks, forward, logits_at
from kvtape.backends.reference.model.weights import Weights
from support.engines import load_engine
from support.llama_tiny import model_file
from support.oracle import OracleModel, OracleSession
from support.reference import SHAPES, text, weights
from support.rewritten_gguf import rewrite_gguf
from support.tiny_gguf import write_tiny

N = 300
"""More than a page of keys and two blocks of rows; windows of 64 are long left."""

LLAMA_ATOL = {"gemma2": 6e-3, "gemma3": 1e-3}
"""Largest logit difference (logits reach 4; gemma2's 28). llama.cpp takes GELU from a table of f16 values."""


def llama_logits(path: Path, tokens: list[int], at: list[int]) -> np.ndarray:
    """Of llama.cpp, f32 rows, prefilled up to each place and then one token."""
    engine = load_engine("llama", path)
    out = []
    for place in at:
        backend = engine.open(SessionConfig(n_ctx=512, kv_type_k="f32", kv_type_v="f32", threads=1))
        out.append(backend.prefill(tokens[: place + 1], 0).logits)
        backend.close()
    engine.close()
    return np.stack(out)


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_logits_are_those_of_llama_cpp(shape: str) -> None:
    tokens, at = text(N), [0, 63, 64, 255, 256, N - 1]
    want = llama_logits(model_file(**SHAPES[shape]), tokens, at)
    np.testing.assert_allclose(logits_at(weights(shape), tokens, at), want, rtol=0, atol=LLAMA_ATOL.get(shape, 1e-5))


@pytest.mark.parametrize(("storage", "atol"), [("f16", 2e-3), ("q8_0", 6e-2), ("q4_0", 8e-2)])
def test_packed_formats_are_those_of_llama_cpp(storage: str, atol: float) -> None:
    """llama.cpp rounds what it multiplies (to f16, to int8); the distance is its rounding."""
    model = weights("llama", storage=storage)
    want = llama_logits(Path(model.path), text(50), [49])
    got = logits_at(model, text(50), [49])
    np.testing.assert_allclose(got, want, rtol=0, atol=atol)
    assert got.argmax() == want.argmax()


@pytest.mark.parametrize("shape", ["llama", "qwen2", "qwen3"])
def test_float64_is_the_oracle_to_its_last_digits(shape: str) -> None:
    tokens = text(40)
    oracle = OracleSession(OracleModel(model_file(**SHAPES[shape])))
    want = oracle.prefill(tokens, 0)[-1]
    double = logits_at(weights(shape, "float64"), tokens, [39])[0]
    assert double.dtype == np.float64
    np.testing.assert_allclose(double, want, rtol=0, atol=1e-12)
    np.testing.assert_allclose(logits_at(weights(shape), tokens, [39])[0], want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shape", ["gemma2", "gemma3", "yarn"])
def test_float32_is_close_to_float64(shape: str) -> None:
    tokens, at = text(N), [0, N // 2, N - 1]
    np.testing.assert_allclose(
        logits_at(weights(shape), tokens, at), logits_at(weights(shape, "float64"), tokens, at), rtol=0, atol=5e-5
    )


def _rope_variant(path: Path, key: str) -> Path:
    """A tiny llama with a table of frequency factors, or with linear scaling."""

    def scaling(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.5)

    plain, target = write_tiny(path, "llama"), path.with_suffix(".out")
    if key == "linear":
        return rewrite_gguf(plain, target, keys=scaling)
    return rewrite_gguf(plain, target, more={"rope_freqs.weight": np.linspace(1, 8, 16, dtype=np.float32)})


@pytest.mark.parametrize("key", ["factors", "linear"])
def test_rope_variants_are_those_of_llama_cpp(tmp_path: Path, key: str) -> None:
    path, tokens = _rope_variant(tmp_path / "tiny.gguf", key), text(200)
    got = logits_at(Weights(path), tokens, [199])
    np.testing.assert_allclose(got, llama_logits(path, tokens, [199]), rtol=0, atol=1e-5)
    plain = logits_at(Weights(tmp_path / "tiny.gguf"), tokens, [199])
    assert np.abs(got - plain).max() > 0.01


@pytest.mark.parametrize(
    ("arch", "shape", "why"),
    [
        ("mamba", {}, "architecture mamba"),
        ("gpt-oss", {}, "architecture gpt-oss"),
        ("qwen2vl", {}, "architecture qwen2vl"),
    ],
)
def test_an_unknown_model_is_refused_by_name(arch: str, shape: dict[str, object], why: str) -> None:
    with pytest.raises(ModelUnsupported, match=why):
        Weights(model_file(arch, **shape))


def test_a_tensor_without_a_use_is_a_refusal(tmp_path: Path) -> None:
    """A forward without it would be another model's."""
    extra = {"blk.1.attn_scale.weight": np.ones(8, np.float32)}
    with pytest.raises(ModelUnsupported, match=r"no use for blk\.\*\.attn_scale\.weight"):
        Weights(rewrite_gguf(model_file("llama"), tmp_path / "odd.gguf", more=extra))


def test_what_a_forward_shows() -> None:
    """Residuals, rows and attention of every layer, each equal to what the layer itself went on with."""
    model, tokens = weights("gemma3"), text(N)
    inputs: dict[int, np.ndarray] = {}
    outputs: dict[int, np.ndarray] = {}
    rows: dict[int, NewRows] = {}
    mass = np.zeros((model.architecture.n_layer, N))
    heads: set[int] = set()

    def attention(layer: int, block: AttentionBlock) -> None:
        np.testing.assert_allclose(block.weights.sum(axis=2), 1, rtol=0, atol=1e-5)
        visible = block.positions[None, :] <= block.queries[:, None]
        window = model.architecture.windows[layer]
        if window:
            visible &= block.positions[None, :] > block.queries[:, None] - window
        assert not block.weights[:, ~visible].any()
        here = block.positions < N
        mass[layer, block.positions[here]] += block.weights[:, :, here].sum(axis=(0, 1))
        heads.update(block.members.tolist())

    hooks = LayerHooks(
        before=lambda i, x: inputs.update({i: x.copy()}),
        rows=lambda i, new: rows.update({i: new}),
        attention=attention,
        after=lambda i, x: outputs.update({i: x.copy()}),
    )
    last = forward(model, tokens, hooks=hooks)
    n_layer, n_head = model.architecture.n_layer, model.architecture.shape.n_head
    assert sorted(inputs) == sorted(outputs) == sorted(rows) == list(range(n_layer))
    for layer in range(1, n_layer):
        np.testing.assert_array_equal(inputs[layer], outputs[layer - 1])
        np.testing.assert_array_equal(rows[layer].x, inputs[layer])
    np.testing.assert_array_equal(last, outputs[n_layer - 1])
    np.testing.assert_array_equal(last, forward(model, tokens))
    assert heads == set(range(n_head // model.architecture.shape.n_head_kv))
    np.testing.assert_allclose(mass.sum(axis=1), N * n_head, rtol=1e-4)


def test_a_hook_may_put_other_rows_in_place() -> None:
    model, tokens = weights("llama"), text(20)
    changed = forward(model, tokens, hooks=LayerHooks(before=lambda i, x: x * 2 if i == 1 else None))
    outputs: list[np.ndarray] = []
    forward(model, tokens, hooks=LayerHooks(after=lambda i, x: outputs.append(x) if i == 0 else None))
    replayed = forward(model, tokens, hooks=LayerHooks(after=lambda i, x: outputs[0] * 2 if i == 0 else None))
    np.testing.assert_array_equal(changed, replayed)
    assert np.abs(changed - forward(model, tokens)).max() > 1e-3
    with pytest.raises(ValueError, match="shape"):
        forward(model, tokens, hooks=LayerHooks(after=lambda i, x: x[:1]))


def test_logits_of_any_position_are_those_of_the_shorter_text() -> None:
    model, tokens = weights("qwen3"), text(N)
    every = logits_at(model, tokens, range(N))
    for n in (1, 2, 128, 129, 257):
        np.testing.assert_array_equal(logits_of(model, forward(model, tokens[:n])[-1:])[0], every[n - 1])


def test_no_tokens_are_no_prompt() -> None:
    with pytest.raises(EmptyPrompt):
        forward(weights("llama"), [])
