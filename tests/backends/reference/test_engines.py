"""`standard` and `no-cache` against each other and against a plain loop; steps that fail; what engines report."""

from __future__ import annotations

import numpy as np
import pytest

from kvtape.backends.errors import InputRejected
from kvtape.backends.reference.engines.engine import Contract, KvEngine, StateMask
from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import parse_engine
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.engines.standard import StandardEngine
from kvtape.backends.reference.errors import BackendFailure, EmptyPrompt, ExecutionRefused, StateInvalidated
from kvtape.backends.reference.model.cached_loop import generate_cached
from kvtape.backends.reference.model.dispatch import logits_of
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.forward import forward
from kvtape.backends.reference.model.pages import PAGE
from support.reference import SHAPES, FailingFfn, kv_engine, play, text, weights

PROMPTS = [
    (n, seed) for seed, n in enumerate([1, 2, 3, 5, 8, 13, 16, 17, 18, 21, 31, 32, 33, 48, 55, 64, 65, 90, 120, 250])
]


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_standard_is_no_cache_to_the_bit(shape: str) -> None:
    """Over a border of pages, every step."""
    model, prompt = weights(shape), text(PAGE - 4)
    standard, plain = play("standard", model, prompt, 8), play("no-cache", model, prompt, 8)
    np.testing.assert_array_equal(standard.hidden, plain.hidden)
    np.testing.assert_array_equal(logits_of(model, standard.hidden), logits_of(model, plain.hidden))
    np.testing.assert_array_equal(forward(model, [*prompt, *standard.tokens])[len(prompt) - 1 :], standard.hidden)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_token_streams_are_those_of_a_plain_loop(dtype: str) -> None:
    """On every prompt: without a window, with one (markov-bounded), without a cache."""
    model = weights("llama", dtype)
    for n, seed in PROMPTS if dtype == "float32" else PROMPTS[::5]:
        prompt = text(n, seed)
        free, bounded = generate_cached(model, prompt, 8), generate_cached(model, prompt, 8, window=16)
        assert play("standard", model, prompt, 8).tokens == free
        assert play("none", model, prompt, 8).tokens == free
        assert play("standard:window=16", model, prompt, 8).tokens == bounded


def test_a_window_matters() -> None:
    model, prompt = weights("llama"), text(120)
    assert play("standard", model, prompt, 12).tokens != play("standard:window=16", model, prompt, 12).tokens


@pytest.mark.parametrize(("window", "n"), [(1, 5), (16, 40), (PAGE, PAGE + 30), (PAGE + 7, 2 * PAGE + 40)])
def test_a_window_is_the_masked_forward_to_the_bit(window: int, n: int) -> None:
    """Rows that left and rows that are hidden are the same, wherever the window's edge stands in a page."""
    model, prompt = weights("qwen3"), text(n)
    run = play(f"standard:window={window}", model, prompt, 6)
    whole = forward(model, [*prompt, *run.tokens], window=window)
    np.testing.assert_array_equal(run.hidden, whole[n - 1 :])
    assert run.engine.window_tokens == window
    memory = run.engine.memory()
    assert (memory.reachable_tokens, memory.rows) == (min(window, n + 6), min(window, n + 6))
    assert run.engine.read_kv_row(0, n + 5) is not None
    assert run.engine.read_kv_row(0, n + 6 - window - 1) is None


def test_the_legacy_rule_sees_one_row_more_than_it_holds() -> None:
    model, prompt = weights("llama"), text(60)
    legacy = play("standard:window=16,window_rule=legacy", model, prompt, 8)
    np.testing.assert_array_equal(legacy.hidden, play("standard:window=17", model, prompt, 8).hidden)
    memory = legacy.engine.memory()
    assert (memory.reachable_tokens, memory.rows) == (17, 16)
    assert legacy.engine.window_tokens == 17


@pytest.mark.parametrize(
    "spec", ["no-cache", "standard", "standard:window=16", "standard:window=16,window_rule=legacy"]
)
@pytest.mark.parametrize("layer", range(2))
@pytest.mark.parametrize("n", [8, 15, 16, 17, 40])
def test_a_failed_step_can_be_tried_again(spec: str, layer: int, n: int) -> None:
    """At every layer, around the moment when the window is full: the same bits as if nothing had happened."""
    model, prompt = weights("llama"), text(n)
    undisturbed = play(spec, model, prompt, 4)
    engine = kv_engine(spec)
    engine.prefill(model, LocalFfn(model), prompt)
    for i, token in enumerate(undisturbed.tokens):
        before = (engine.memory().rows, engine.memory().occupied_bytes, dict(engine.stage_summary()))
        with pytest.raises(BackendFailure, match=f"layer {layer}"):
            engine.decode_step(model, FailingFfn(model, layer), token)
        assert (engine.memory().rows, engine.memory().occupied_bytes, dict(engine.stage_summary())) == before
        hidden = engine.decode_step(model, FailingFfn(model, layer, times=0), token)
        np.testing.assert_array_equal(hidden[0], undisturbed.hidden[i + 1])


@pytest.mark.parametrize("spec", ["no-cache", "standard"])
def test_a_failed_prefill_leaves_the_session_as_it_was(spec: str) -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = kv_engine(spec)
    with pytest.raises(BackendFailure):
        engine.prefill(model, FailingFfn(model, 1), text(9))
    with pytest.raises(EmptyPrompt):
        engine.decode_step(model, local, 5)
    engine.prefill(model, local, text(20))
    with pytest.raises(BackendFailure):
        engine.prefill(model, FailingFfn(model, 1), text(9))
    want = forward(model, [*text(20), 5])[-1]
    np.testing.assert_array_equal(engine.decode_step(model, local, 5)[0], want)
    assert engine.handle().n_tokens == 21


def test_a_step_that_cannot_be_taken_back_invalidates_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = kv_engine("standard")
    engine.prefill(model, local, text(9))
    monkeypatch.setattr(StandardEngine, "_rewind", _fails)
    with pytest.raises(StateInvalidated, match=r"BackendFailure.*as planned to fail"):
        engine.decode_step(model, FailingFfn(model, 0), 5)
    with pytest.raises(StateInvalidated, match="prefill the session again"):
        engine.decode_step(model, local, 5)
    engine.prefill(model, local, text(9))
    np.testing.assert_array_equal(engine.decode_step(model, local, 5)[0], forward(model, [*text(9), 5])[-1])


def _fails(self: SessionEngine) -> None:
    raise RuntimeError("as planned to fail")


def test_rows_that_a_rewind_misses_are_noticed() -> None:
    """A layer that lost a row is no state to go on from."""
    model = weights("llama")
    engine = kv_engine("standard")
    engine.prefill(model, LocalFfn(model), text(9))
    assert isinstance(engine, StandardEngine)
    assert engine._rows is not None
    engine._rows.layers[1].remove(3, 4)
    with pytest.raises(StateInvalidated, match="does not hold 9 rows"):
        engine.decode_step(model, FailingFfn(model, 0), 5)


def test_what_an_engine_must_not_be_given() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = kv_engine("standard")
    with pytest.raises(EmptyPrompt):
        engine.prefill(model, local, [])
    with pytest.raises(InputRejected, match="not in the vocabulary"):
        engine.prefill(model, local, [model.n_vocab])
    with pytest.raises(EmptyPrompt):
        engine.read_kv_row(0, 0)
    engine.prefill(model, local, text(4))
    with pytest.raises(InputRejected):
        engine.decode_step(model, local, -1)
    with pytest.raises(ExecutionRefused, match="other weights"):
        engine.decode_step(weights("qwen3"), local, 5)
    with pytest.raises(IndexError):
        engine.read_kv_row(2, 0)
    assert engine.handle().n_tokens == 4


def test_a_row_is_what_the_layer_computed() -> None:
    model, prompt = weights("llama"), text(30)
    engine = StandardEngine(kv_engine("standard").info)
    engine.mask = StateMask.FULL
    engine.prefill(model, LocalFfn(model), prompt)
    state = engine.last_state
    assert state is not None
    assert state.keys is not None
    assert state.values is not None
    for layer, position in [(0, 0), (1, 17), (1, 29)]:
        row = engine.read_kv_row(layer, position)
        assert row is not None
        np.testing.assert_array_equal(row[0], state.keys[layer, position])
        np.testing.assert_array_equal(row[1], state.values[layer, position])
    assert engine.read_kv_row(0, 30) is None
    assert kv_engine("standard").memory().rows == 0


def test_a_mask_says_how_much_of_a_step_is_kept() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = StandardEngine(kv_engine("standard").info)
    engine.prefill(model, local, text(5))
    assert engine.last_state is None
    engine.mask = StateMask.H_ONLY
    engine.decode_step(model, local, 7)
    state = engine.last_state
    assert state is not None
    assert state.keys is None
    assert state.values is None
    assert state.positions.tolist() == [5]
    assert state.h.shape == (2, 1, 64)
    rows: list[np.ndarray] = []
    from kvtape.backends.reference.model.forward import LayerHooks

    forward(model, [*text(5), 7], hooks=LayerHooks(before=lambda i, x: rows.append(x[-1]) or None))
    np.testing.assert_array_equal(state.h[:, 0], np.stack(rows))


def test_memory_is_occupancy_and_capacity_apart() -> None:
    model = weights("llama")
    run = play("standard", model, text(PAGE + 1), 0)
    memory = run.engine.memory()
    row = 2 * 2 * 32 * 4 * model.architecture.n_layer
    assert (memory.reachable_tokens, memory.rows) == (PAGE + 1, PAGE + 1)
    assert memory.occupied_bytes == (PAGE + 1) * row
    assert memory.allocated_bytes == 2 * PAGE * row
    assert memory.cold_bytes == 0
    bare = play("no-cache", model, text(10), 2).engine
    assert bare.memory().occupied_bytes == 4 * 12
    assert (bare.memory().reachable_tokens, bare.memory().rows) == (12, 0)
    assert bare.stage_summary() == {"rows_computed": 10 + 11 + 12}
    assert run.engine.stage_summary() == {"rows_computed": PAGE + 1}


def test_the_harness_takes_any_engine_and_another_router_in_the_middle() -> None:
    model = weights("llama")
    harness = Harness(parse_engine("standard"), model)
    assert isinstance(harness.engine, KvEngine)
    tokens = harness.greedy(text(9), 5)
    assert tokens == play("standard", model, text(9), 5).tokens
    seen = []
    for i, logits in enumerate(harness.forced(text(9), tokens)):
        harness.router = FailingFfn(model, 0, times=0) if i == 2 else LocalFfn(model)
        seen.append(int(logits.argmax()))
    assert seen == tokens


def test_contracts_say_what_a_window_makes_of_them() -> None:
    assert kv_engine("standard").info.contract is Contract.EXACT
    assert kv_engine("standard:window=9").info.contract is Contract.EXACT_IN_WINDOW
    assert kv_engine("none").info.quadratic
