"""One pass over a real model: tokenizer, logits, eviction."""

from __future__ import annotations

import llama_cpp
import numpy as np
import pytest

from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.protocol import SessionConfig
from kvtape.cli.models import demo_model
from kvtape.planner.layout import Segment
from support.openvino_tiny import assert_whole

SAMPLE = "Hello wörld! 123456\nit's  fine\t\n\n日本語 🎉 def f(x): return x**2\n" * 3


@pytest.fixture(scope="module")
def engine() -> OpenVinoEngine:
    return OpenVinoEngine.load(demo_model())


def test_tokens_are_those_of_llama_cpp(engine: OpenVinoEngine) -> None:
    model = llama_cpp.Llama(str(demo_model()), vocab_only=True, verbose=False)
    for text in (SAMPLE, "The quick brown fox jumps over the lazy dog. " * 2000):
        assert engine.tokenize(text) == model.tokenize(text.encode(), add_bos=False, special=False)
    assert engine.detokenize(engine.tokenize(SAMPLE)) == SAMPLE


def test_a_real_session_evicts_shifts_and_goes_on(engine: OpenVinoEngine) -> None:
    backend = engine.open(SessionConfig(n_ctx=512, chunk=128, cold_budget_tokens=256))
    assert backend.capabilities.position_shift
    assert (backend.config.kv_type_k, backend.config.kv_type_v) == ("f32", "f32")
    ids = engine.tokenize("The capital of France is Paris, and the capital of Italy is Rome. " * 8)
    logits = backend.prefill(ids, 0).logits
    n = len(ids)
    block = backend.export_block(16, 64)
    saved = backend.snapshot()
    backend.evict(16, 64)
    backend.shift(64, n, -48)
    assert_whole(backend)
    run = backend.decode_until(8, 512, n, logits, lambda x: int(x.argmax()))
    assert "The capital of France is Paris" in engine.detokenize(run.tokens)
    assert backend.books() == (Segment(0, 16, 0), Segment(64, n - 64 + 8, 16))
    backend.restore(saved)
    backend.evict(16, 64)
    backend.admit(block, 16, 16)
    again = backend.decode_until(8, 512, n, logits, lambda x: int(x.argmax()))
    backend.restore(saved)
    untouched = backend.decode_until(8, 512, n, logits, lambda x: int(x.argmax()))
    assert again.tokens == untouched.tokens
    np.testing.assert_array_equal(again.logits, untouched.logits)
    assert_whole(backend)
    backend.close()
