"""The real model: what the tiny ones cannot show (quantised weights, a large vocabulary, f16 rows, real text)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kvtape.backends.llama.engine import LlamaEngine
from kvtape.backends.protocol import SessionConfig
from kvtape.cli.models import demo_model

TEXT = "The cache keeps the keys and the values of every token that the model has read. " * 8


@pytest.fixture(scope="module")
def engine() -> Iterator[LlamaEngine]:
    loaded = LlamaEngine.load(demo_model())
    yield loaded
    loaded.close()


def test_a_session_on_the_real_model(engine: LlamaEngine) -> None:
    ids = engine.tokenize(TEXT)
    assert engine.detokenize(ids) == TEXT
    backend = engine.open(SessionConfig(n_ctx=256, cold_budget_tokens=64))
    assert backend.capabilities.position_shift
    assert backend.capabilities.recompute_range
    computed = backend.prefill(ids, 0)
    before = backend.witness()
    block = backend.export_block(40, 72)
    backend.evict(40, 72)
    assert len(backend.witness().cache_positions) == len(ids) - 32
    backend.admit(block, 40, 40)
    after = backend.witness()
    order = np.argsort(after.cache_positions)
    assert len(after.rows.keys) == 30
    for old, new in zip((*before.rows.keys, *before.rows.values), (*after.rows.keys, *after.rows.values), strict=True):
        assert old.dtype == np.float16
        np.testing.assert_array_equal(new[order], old)
    saved = backend.snapshot()
    run = backend.decode_until(12, 256, len(ids), computed.logits, lambda logits: int(logits.argmax()))
    backend.restore(saved)
    again = backend.decode_until(12, 256, len(ids), computed.logits, lambda logits: int(logits.argmax()))
    assert again.tokens == run.tokens
    np.testing.assert_array_equal(again.logits, run.logits)
    assert engine.detokenize(run.tokens).strip().startswith("The cache")


def test_an_eviction_that_is_compacted_leaves_a_working_model(engine: LlamaEngine) -> None:
    ids = engine.tokenize(TEXT)
    backend = engine.open(SessionConfig(n_ctx=256))
    computed = backend.prefill(ids, 0)
    backend.evict(20, 60)
    backend.shift(60, len(ids), -40)
    run = backend.decode_until(12, 256, len(ids), computed.logits, lambda logits: int(logits.argmax()))
    assert backend.books()[-1].cache_stop == len(ids) - 40 + 12
    assert engine.detokenize(run.tokens).strip().startswith("The cache")


def test_attention_is_read_and_changes_nothing(engine: LlamaEngine) -> None:
    ids = engine.tokenize(TEXT)
    scored, plain = (engine.open(SessionConfig(n_ctx=256, options={"scores": s})) for s in ("on", "off"))
    assert scored.capabilities.attention_scores
    scored.prefill(ids[:90], 0)
    plain.prefill(ids[:90], 0)
    mass = scored.take_mass()
    assert mass.layers == tuple(range(30))
    np.testing.assert_allclose(mass.mass.sum(axis=1), 9 * 90, rtol=1e-5)
    for backend in (scored, plain):
        backend.evict(20, 60)
    probe = scored.score(ids[90:110], 90)
    assert probe.tape_positions.tolist() == [*range(20), *range(60, 90)]
    logits = [backend.prefill(ids[90:110], 90).logits for backend in (scored, plain)]
    np.testing.assert_array_equal(*logits)
    real = scored.take_mass()
    np.testing.assert_array_equal(real.mass[:, :50], probe.mass)
    for backend in (scored, plain):
        backend.close()
