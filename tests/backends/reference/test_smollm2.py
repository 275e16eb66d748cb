"""The real model: quantised weights, a large vocabulary, real text. `benchmarks/bench_reference.py` has the figures."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvtape.backends.protocol import SessionConfig
from kvtape.backends.reference.model.dispatch import logits_of
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.forward import forward
from kvtape.backends.reference.model.weights import Weights
from kvtape.cli.models import demo_model
from support.engines import load_engine
from support.reference import kv_engine
from support.repository import ROOT

PROMPT, STEPS = 100, 24


def test_the_reference_on_the_real_model() -> None:
    """Near llama.cpp (which rounds activations to int8: mean KL 0.0025), and exact in itself."""
    path = demo_model()
    tokens, theirs = _llama(path)
    model = Weights(path)
    whole = forward(model, tokens)
    _near(logits_of(model, whole[PROMPT - 1 : -1]), theirs)
    engine, local = kv_engine("standard"), LocalFfn(model)
    hidden = [engine.prefill(model, local, tokens[:PROMPT])]
    hidden += [engine.decode_step(model, local, token) for token in tokens[PROMPT : PROMPT + 3]]
    np.testing.assert_array_equal(np.concatenate(hidden), whole[PROMPT - 1 : PROMPT + 3])
    packed = Weights(path, packed=True)
    np.testing.assert_array_equal(forward(packed, tokens[:4]), whole[:4])
    assert packed.report().packed == packed.report().matrices == 211
    assert packed.report().resident_bytes == 0


def _llama(path: Path) -> tuple[list[int], np.ndarray]:
    """The beginning of the shipped essay, and llama.cpp's logits before each of its last tokens."""
    engine = load_engine("llama", path)
    tokens = engine.tokenize((ROOT / "cli" / "text" / "essay.txt").read_text(encoding="utf-8"))[: PROMPT + STEPS]
    backend = engine.open(SessionConfig(n_ctx=128, kv_type_k="f32", kv_type_v="f32"))
    computed, seen = backend.prefill(tokens[:PROMPT], 0), []
    left = iter(tokens[PROMPT:])
    backend.decode_until(STEPS, 128, PROMPT, computed.logits, lambda x: seen.append(x.copy()) or next(left))
    backend.close()
    engine.close()
    return tokens, np.stack(seen)


def _near(ours: np.ndarray, theirs: np.ndarray) -> None:
    p, q = (x - np.log(np.exp(x).sum(axis=1, keepdims=True)) for x in (ours.astype(float), theirs.astype(float)))
    assert p.shape == q.shape == (STEPS, 49152)
    assert (np.exp(p) * (p - q)).sum(axis=1).mean() < 0.01
    assert (p.argmax(axis=1) == q.argmax(axis=1)).mean() >= 0.9
