"""Experts: which rows go where, the same bits in any company and through any router, and what is refused.

That the whole forward is llama.cpp's is in test_forward, with every other kind of model.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.reference.errors import ModelUnsupported
from kvtape.backends.reference.model.feed_forward import Experts, Gated, feed_forward, route
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.forward import logits_at
from kvtape.backends.reference.model.linear import Projection
from kvtape.backends.reference.model.matrix import Matrix
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.remote.ffn_remote import RemoteFfn
from support.ffn_host import served
from support.llama_tiny import model_file
from support.reference import SHAPES, kv_engine, play, text, weights
from support.rewritten_gguf import rewrite_gguf

MIXED = ["mixtral", "qwen2moe", "qwen3moe"]


def _experts(shape: str, layer: int = 0) -> Experts:
    feed = weights(shape).layers[layer].feed
    assert isinstance(feed, Experts)
    return feed


def _rows(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 64)).astype(np.float32)


def _dense(projection: Projection) -> np.ndarray:
    return np.concatenate([tile for _, tile in projection.matrix.tiles()]).astype(np.float64)


def _by_hand(h: np.ndarray, w: Gated) -> np.ndarray:
    gate, up = h @ _dense(w.gate).T, h @ _dense(w.up).T
    return np.asarray((gate / (1 + np.exp(-gate)) * up) @ _dense(w.down).T)


@pytest.mark.parametrize("shape", MIXED)
def test_a_row_is_what_its_experts_say(shape: str) -> None:
    """Row by row in float64, from the definition."""
    experts, rows = _experts(shape), _rows(50)
    assert len(experts.gated) == SHAPES[shape].get("n_expert", 6)
    assert (experts.shared is not None, experts.normalised) == (shape == "qwen2moe", shape != "qwen2moe")
    want = np.empty((50, 64))
    for i, h in enumerate(rows.astype(np.float64)):
        logits = _dense(experts.router) @ h
        p = np.exp(logits) / np.exp(logits).sum()
        top = np.argsort(-p)[:2]
        shares = p[top] / p[top].sum() if experts.normalised else p[top]
        want[i] = sum(share * _by_hand(h, experts.gated[e]) for share, e in zip(shares, top, strict=True))
        if experts.shared:
            want[i] += _by_hand(h, experts.shared.gated) / (1 + np.exp(-experts.shared.weight @ h))
    np.testing.assert_allclose(feed_forward(rows, experts, "silu"), want, rtol=0, atol=2e-5)
    assert len(np.unique(route(rows, experts)[0])) == len(experts.gated)


@pytest.mark.parametrize("shape", MIXED)
def test_the_rule_of_shares_shows_in_the_logits(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that agreement with llama.cpp, within 1e-5, says that the rule is right."""
    model, tokens = weights(shape), text(20)
    right = logits_at(model, tokens, [19])
    layers = tuple(
        dataclasses.replace(layer, feed=dataclasses.replace(layer.feed, normalised=shape == "qwen2moe"))  # type: ignore[arg-type, type-var]
        for layer in model.layers
    )
    monkeypatch.setattr(model, "layers", layers)
    assert np.abs(logits_at(model, tokens, [19]) - right).max() > 1e-2


@given(n=st.integers(1, 60), seed=st.integers(0, 99), shape=st.sampled_from(MIXED))
def test_a_row_has_the_same_bits_in_any_company(n: int, seed: int, shape: str) -> None:
    experts, rows = _experts(shape), _rows(n, seed)
    together = feed_forward(rows, experts, "silu")
    i = seed % n
    np.testing.assert_array_equal(feed_forward(rows[i : i + 1], experts, "silu")[0], together[i])


def test_equal_experts_are_taken_in_order() -> None:
    experts = _experts("mixtral")
    chosen, shares = route(np.zeros((3, 64), np.float32), experts)
    assert chosen.tolist() == [[0, 1]] * 3
    np.testing.assert_array_equal(shares, 0.5)


@pytest.mark.parametrize("shape", MIXED)
def test_experts_at_a_server_are_local_ones_to_the_bit(shape: str) -> None:
    """The same router protocol, and the same engines: nobody but the feed-forward knows of experts."""
    model, prompt = weights(shape), text(30)
    local = play("standard", model, prompt, 4)
    with served(model) as server:
        engine, remote = kv_engine("standard"), RemoteFfn(server.url, model)
        hidden = [engine.prefill(model, remote, prompt)]
        for i, token in enumerate(local.tokens):
            hidden.append(engine.decode_step(model, remote if i % 2 else LocalFfn(model), token))
        remote.close()
    np.testing.assert_array_equal(np.concatenate(hidden), local.hidden)


@pytest.mark.parametrize("storage", ["f16", "q8_0"])
@pytest.mark.parametrize("shape", MIXED)
def test_packed_experts_are_plain_ones_to_the_bit(shape: str, storage: str) -> None:
    plain, packed = (Weights(model_file(**SHAPES[shape], weights=storage), packed=way) for way in (False, True))
    runs = [play("standard", model, text(40), 4) for model in (plain, packed)]
    np.testing.assert_array_equal(runs[1].hidden, runs[0].hidden)
    experts = packed.layers[0].feed
    assert isinstance(experts, Experts)
    routers = 2
    matrices = 2 + 2 * (4 + 1 + 3 * len(experts.gated) + 3 * (experts.shared is not None))
    report = packed.report()
    assert (report.matrices, report.packed) == (matrices, matrices - routers)
    assert plain.report().packed == report.resident_bytes == 0
    assert report.tiles_unpacked > 0


def test_only_chosen_experts_are_unpacked() -> None:
    packed = Weights(model_file(**SHAPES["qwen3moe"], weights="q8_0"), packed=True)
    experts = packed.layers[0].feed
    assert isinstance(experts, Experts)
    row = _rows(1)
    LocalFfn(packed).feed(0, row)
    chosen = set(route(row, experts)[0][0].tolist())
    used = {i for i, gated in enumerate(experts.gated) if _unpacked(gated.gate.matrix)}
    assert used == chosen
    assert len(used) == 2


def _unpacked(matrix: Matrix) -> bool:
    return matrix.tiles_unpacked > 0


@pytest.mark.parametrize(("used", "message"), [(7, "7 of 6 experts used"), (0, "0 of 6 experts used")])
def test_impossible_numbers_of_experts_are_refused(used: int, message: str) -> None:
    with pytest.raises(ModelUnsupported, match=message):
        Weights(model_file("qwen3moe", n_expert_used=used))


@pytest.mark.parametrize(
    ("shape", "key", "message"),
    [
        ("qwen3moe", "expert_gating_func", "another rule than softmax"),
        ("mixtral", "expert_group_count", "experts in groups"),
        ("mixtral", "expert_weights_scale", "a scale of its own for experts"),
        ("gemma2", "expert_count", "experts in gemma2; the reference knows those of llama"),
    ],
)
def test_other_experts_are_refused_by_name(shape: str, key: str, message: str, tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_uint32(f"{SHAPES[shape]['arch']}.{key}", 2)
        if key == "expert_count":
            writer.add_expert_used_count(1)

    with pytest.raises(ModelUnsupported, match=message):
        Weights(rewrite_gguf(model_file(**SHAPES[shape]), tmp_path / "other.gguf", keys=add))
