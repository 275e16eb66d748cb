"""Attention scores of OpenVINO sessions against the float64 oracle, and what taking them must not leave behind."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    EngineFault,
    FatalClass,
    InputRejected,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.openvino.attention import head_mass
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.session import OpenVinoBackend
from kvtape.backends.protocol import SessionConfig
from kvtape.planner.ranges import RangeSet
from support.attention import ScoredOracle, assert_mass, whole_mass
from support.openvino_tiny import assert_whole, same_rows, tiny_path, tiny_session, tokens
from support.oracle import OracleModel

TOLERANCE = 1e-5
"""Largest difference of a row's mass to the oracle's, of masses up to the number of heads times queries."""
MODELS = ("llama", "llama-two-kv-heads", "qwen2", "qwen3")
F16 = {"kv_type_k": "f16", "kv_type_v": "f16"}
SCORES = {"scores": "on"}


def scored(model: str = "llama", **config: Any) -> OpenVinoBackend:
    return tiny_session(model, **{"options": SCORES} | config)


def oracle_of(model: str) -> ScoredOracle:
    return ScoredOracle(OracleModel(tiny_path(model)))


def forced(ids: list[int]) -> Callable[[np.ndarray], int | None]:
    left = iter(ids)
    return lambda _logits: next(left, None)


def decode(backend: OpenVinoBackend, ids: list[int], tape_start: int) -> None:
    run = backend.decode_until(len(ids), 512, tape_start, np.empty(0, np.float32), forced(ids))
    assert run.tokens == tuple(ids)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_mass_of_prefill_and_decode(model: str, chunk: int) -> None:
    ids = tokens(50)
    backend, oracle = scored(model, chunk=chunk), oracle_of(model)
    backend.prefill(ids[:40], 0)
    oracle.prefill(ids[:40], 0)
    first = backend.take_mass()
    assert_mass(first, oracle.take(), TOLERANCE)
    np.testing.assert_allclose(whole_mass(first), oracle.model.n_head * 40, rtol=1e-6)
    decode(backend, ids[40:], 40)
    oracle.prefill(ids[40:], 40)
    second = backend.take_mass()
    assert_mass(second, oracle.take(), TOLERANCE)
    np.testing.assert_allclose(whole_mass(second), oracle.model.n_head * 10, rtol=1e-6)
    assert backend.take_mass().n_queries == 0
    assert not backend.take_mass().mass.any()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("each", [False, True], ids=["taken at the end", "taken after every step"])
def test_mass_goes_with_the_rows_through_every_surgery(model: str, each: bool) -> None:
    ids = tokens(40)
    backend, oracle = scored(model), oracle_of(model)

    def continues(next_tape: int) -> None:
        more = tokens(2, seed=next_tape)
        decode(backend, more, next_tape)
        oracle.prefill(more, next_tape)
        if each:
            assert_mass(backend.take_mass(), oracle.take(), TOLERANCE)

    backend.prefill(ids, 0)
    oracle.prefill(ids, 0)
    block = backend.export_block(8, 16)
    continues(40)
    backend.evict(8, 16)
    rows = oracle.evict(8, 16)
    continues(42)
    backend.shift(16, 44, -8)
    oracle.shift(16, 44, -8)
    continues(44)
    backend.admit(block, 8, 38)
    oracle.admit(rows, 8, 38)
    continues(46)
    backend.evict(20, 24)
    oracle.evict(20, 24)
    continues(48)
    backend.refill(ids[20:24], 20, 12)
    oracle.refill(ids[20:24], 20, 12)
    continues(50)
    assert_mass(backend.score(ids[:3], 52), oracle.score(ids[:3], 52), TOLERANCE)
    assert_mass(backend.score(ids[30:40], 30), oracle.score(ids[30:40], 30), TOLERANCE)
    backend.truncate(30)
    oracle.truncate(30)
    continues(30)
    assert_mass(backend.take_mass(), oracle.take(), TOLERANCE)
    kept = [(0, 5), (20, 30)]
    backend.rebuild(RangeSet(kept), ids[:5] + ids[20:30])
    oracle.rebuild(kept, ids[:5] + ids[20:30])
    continues(50)
    assert_mass(backend.take_mass(), oracle.take(), TOLERANCE)
    assert_whole(backend)


def test_an_evicted_row_loses_its_mass_and_begins_at_zero_when_it_is_admitted() -> None:
    backend = scored()
    backend.prefill(tokens(20), 0)
    block = backend.export_block(4, 9)
    backend.evict(4, 9)
    backend.admit(block, 4, 4)
    mass = backend.take_mass()
    assert mass.tape_positions.tolist() == list(range(20))
    assert mass.n_queries == 20
    assert not mass.mass[:, 4:9].any()
    assert mass.mass[:, :4].all()
    assert mass.mass[:, 9:].all()


def test_rows_of_a_snapshot_begin_at_zero() -> None:
    backend = scored()
    backend.prefill(tokens(20), 0)
    saved = backend.snapshot()
    decode(backend, tokens(3), 20)
    backend.restore(saved)
    mass = backend.take_mass()
    assert mass.tape_positions.tolist() == list(range(20))
    assert mass.n_queries == 23
    assert not mass.mass.any()


STEPS = ("decode", "prefill", "evict", "refill", "admit", "close the gap", "truncate", "take", "probe", "window")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.sampled_from(STEPS), max_size=12), st.integers(1, 40))
def test_any_order_of_operations_gives_the_mass_of_the_oracle(steps: list[str], chunk: int) -> None:
    backend, oracle = scored("llama-two-kv-heads", chunk=chunk), oracle_of("llama-two-kv-heads")
    ids = tokens(24)
    backend.prefill(ids, 0)
    oracle.prefill(ids, 0)
    block, rows = backend.export_block(4, 8), oracle.snapshot()
    n = 24
    for step in (*steps, "take"):
        hole = 4 not in oracle.rows
        open_gap = hole and oracle.rows[8].cache == 8
        if step in ("decode", "prefill"):
            more = tokens(3, seed=n)
            _ = decode(backend, more, n) if step == "decode" else backend.prefill(more, n)
            oracle.prefill(more, n)
            n += 3
        elif step == "evict" and not hole and oracle.rows[4].cache == 4:
            backend.evict(4, 8)
            oracle.evict(4, 8)
        elif step == "refill" and open_gap:
            backend.refill(ids[4:8], 4, 4)
            oracle.refill(ids[4:8], 4, 4)
        elif step == "admit" and hole:
            at = 4 if open_gap else oracle._next()
            backend.admit(block, 4, at)
            oracle.admit([rows[t] for t in range(4, 8)], 4, at)
        elif step == "close the gap" and open_gap:
            backend.shift(8, oracle._next(), -4)
            oracle.shift(8, oracle._next(), -4)
        elif step == "truncate" and n > 24 and oracle.rows.get(4) and oracle.rows[4].cache == 4:
            n -= 2
            backend.truncate(n)
            oracle.truncate(n)
        elif step == "take":
            assert_mass(backend.take_mass(), oracle.take(), TOLERANCE)
        elif step == "probe":
            assert_mass(backend.score(ids[:5], n), oracle.score(ids[:5], n), TOLERANCE)
        elif step == "window":
            assert_mass(backend.score(ids[20:24], 20), oracle.score(ids[20:24], 20), TOLERANCE)
    backend.close()


@pytest.mark.parametrize("model", MODELS)
def test_a_window_pays_what_its_tokens_paid(model: str) -> None:
    """Computed again, the last window's queries are those that were: their own mass is all that is missing."""
    ids = tokens(40)
    backend, oracle = scored(model, chunk=5), oracle_of(model)
    backend.prefill(ids[:30], 0)
    oracle.prefill(ids[:30], 0)
    backend.take_mass()
    backend.prefill(ids[30:], 30)
    paid = backend.take_mass()
    window = backend.score(ids[30:], 30)
    np.testing.assert_allclose(window.mass, paid.mass[:, :30], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(window.peak, paid.peak[:, :30], rtol=0, atol=TOLERANCE)
    oracle.prefill(ids[30:], 30)
    assert_mass(window, oracle.score(ids[30:], 30), TOLERANCE)
    assert (whole_mass(window) < oracle.model.n_head * 10 - 1).all()


def test_a_window_stands_where_it_stood_behind_a_gap() -> None:
    ids = tokens(40)
    backend, oracle = scored(), oracle_of("llama")
    for one in (backend, oracle):
        one.prefill(ids, 0)
        one.evict(10, 30)
    assert_mass(backend.score(ids[30:], 30), oracle.score(ids[30:], 30), TOLERANCE)


def test_layers_are_chosen() -> None:
    backend = scored("qwen3")
    oracle = oracle_of("qwen3")
    for one in (backend, oracle):
        one.prefill(tokens(20), 0)
    want = oracle.score(tokens(4, seed=1), 20)
    assert_mass(backend.score(tokens(4, seed=1), 20, layers=[1]), want, TOLERANCE, [1])
    assert_mass(backend.score(tokens(4, seed=1), 20, layers=(1, 0)), want, TOLERANCE)


def test_a_probe_into_an_empty_cache_scores_no_rows() -> None:
    mass = scored().score(tokens(4), 0)
    assert mass.mass.shape == mass.peak.shape == (2, 0)
    assert mass.n_queries == 4


@pytest.mark.parametrize("config", [{}, F16 | {"options": SCORES | {"kv": "asked"}}], ids=["f32", "f16"])
@pytest.mark.parametrize("rebased", [False, True])
def test_scores_leave_nothing_behind(config: dict[str, Any], rebased: bool) -> None:
    ids = tokens(60)
    asked, untouched = scored(**config), scored(**config)
    for backend in (asked, untouched):
        backend.prefill(ids[:40], 0)
        backend.evict(8, 16)
        if rebased:
            backend.shift(16, 40, -8)
        decode(backend, ids[40:45], 40)
    before, books = asked.snapshot(), asked.books()
    probe = asked.score(ids[:20], 45)
    asked.score(ids[30:40], 30, layers=[0])
    np.testing.assert_array_equal(asked.score(ids[:20], 45).mass, probe.mass)
    assert asked.books() == books
    assert asked.snapshot() == before
    assert same_rows(asked, untouched)
    assert_whole(asked)
    one, other = asked.take_mass(), untouched.take_mass()
    np.testing.assert_array_equal(one.mass, other.mass)
    assert one.n_queries == other.n_queries
    logits = [b.prefill(ids[45:], 45).logits for b in (asked, untouched)]
    np.testing.assert_array_equal(*logits)
    assert same_rows(asked, untouched)


def test_logits_and_rows_are_those_of_a_session_without_scores() -> None:
    ids = tokens(50)
    on, off = scored("qwen2", chunk=9), tiny_session("qwen2", chunk=9)
    logits = [b.prefill(ids[:40], 0).logits for b in (on, off)]
    np.testing.assert_array_equal(*logits)
    runs = [b.decode_until(10, 512, 40, logits[0], lambda x: int(x.argmax())) for b in (on, off)]
    np.testing.assert_array_equal(runs[0].logits, runs[1].logits)
    assert same_rows(on, off)


def test_f16_storage_and_yarn_are_scored() -> None:
    ids = tokens(40)
    oracle = oracle_of("llama")
    oracle.prefill(ids, 0)
    half = scored(**F16, options=SCORES | {"kv": "asked"})
    half.prefill(ids, 0)
    assert half.config.kv_type_k == "f16"
    assert_mass(half.take_mass(), oracle.take(), 2e-2)
    yarn = scored("llama-yarn")
    yarn.prefill(ids, 0)
    np.testing.assert_allclose(whole_mass(yarn.take_mass()), 2 * 40, rtol=1e-6)


# --- refusals and failures -----------------------------------------------------------------------------------


def test_scores_need_the_host_copy() -> None:
    with pytest.raises(UsageError, match="scores=on needs mirror=on"):
        tiny_session(options={"scores": "on", "mirror": "off"})


def test_a_session_without_scores_refuses() -> None:
    backend = tiny_session()
    backend.prefill(tokens(8), 0)
    for call in (lambda: backend.score(tokens(2), 8), backend.take_mass):
        with pytest.raises(UnsupportedOperation, match="scores=on"):
            call()
    assert_whole(backend)


BAD: dict[str, tuple[type[Exception], str, Callable[[OpenVinoBackend], object]]] = {
    "no tokens": (InputRejected, "no tokens", lambda b: b.score([], 20)),
    "a token there is not": (InputRejected, "vocabulary", lambda b: b.score([10**6], 20)),
    "a negative place": (InputRejected, "negative", lambda b: b.score([4], -1)),
    "no layers": (InputRejected, "layers", lambda b: b.score([4], 20, layers=[])),
    "a layer twice": (InputRejected, "layers", lambda b: b.score([4], 20, layers=[1, 1])),
    "a layer there is not": (InputRejected, "layer 2", lambda b: b.score([4], 20, layers=[2])),
    "a negative layer": (InputRejected, "layer -1", lambda b: b.score([4], 20, layers=[-1])),
    "more than the context": (ContextOverflow, "513", lambda b: b.score(tokens(493), 20)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_scored_is_refused(case: str) -> None:
    error, why, call = BAD[case]
    backend, untouched = scored(), scored()
    for one in (backend, untouched):
        one.prefill(tokens(20), 0)
    with pytest.raises(error, match=why):
        call(backend)
    assert same_rows(backend, untouched)
    np.testing.assert_array_equal(backend.take_mass().mass, untouched.take_mass().mass)


def test_a_window_may_fill_the_context_again() -> None:
    backend = scored(n_ctx=256, chunk=64)
    ids = tokens(256)
    backend.prefill(ids, 0)
    assert backend.score(ids[240:], 240).n_queries == 16


@pytest.fixture
def engine() -> OpenVinoEngine:
    """An engine of its own, so that a poisoned compiled model meets no other test."""
    return OpenVinoEngine.load(tiny_path("llama"))


def on_engine(engine: OpenVinoEngine) -> OpenVinoBackend:
    return engine.open(SessionConfig(n_ctx=512, chunk=16, cold_budget_tokens=64, options=SCORES))


def test_a_cancelled_operation_takes_its_mass_back(engine: OpenVinoEngine) -> None:
    backend, untouched = on_engine(engine), on_engine(engine)
    ids = tokens(60)
    for one in (backend, untouched):
        one.prefill(ids[:40], 0)
        decode(one, ids[40:43], 40)

    def cancel_at_third(_logits: np.ndarray) -> int:
        left.pop()
        if not left:
            backend.cancel()
        return 5

    left = [0, 0, 0]
    with pytest.raises(Cancelled):
        backend.decode_until(9, 512, 43, np.empty(0, np.float32), cancel_at_third)
    for operation in (lambda: backend.score(ids[:9], 43), lambda: backend.prefill(ids[:9], 43), backend.take_mass):
        backend.cancel()
        with pytest.raises(Cancelled):
            operation()
    assert same_rows(backend, untouched)
    one, other = backend.take_mass(), untouched.take_mass()
    assert one.n_queries == other.n_queries == 43
    np.testing.assert_array_equal(one.mass, other.mass)


def score_for_ever(backend: OpenVinoBackend) -> None:
    while True:
        backend.score(tokens(2000), 30)


def test_a_score_stopped_in_the_engine_leaves_the_session_whole() -> None:
    backend, untouched = scored(n_ctx=4096, chunk=2048), scored(n_ctx=4096, chunk=2048)
    for one in (backend, untouched):
        one.prefill(tokens(30), 0)
    imports = backend._state.compiled.imports
    timer = threading.Timer(0.05, backend.cancel)
    timer.start()
    with pytest.raises(Cancelled):
        score_for_ever(backend)
    timer.join()
    assert backend._state.compiled.imports in (imports, imports + 1)  # stopped between calls, or within one
    assert same_rows(backend, untouched)
    np.testing.assert_array_equal(backend.take_mass().mass, untouched.take_mass().mass)


def test_a_failed_score_ends_its_session_and_no_other(engine: OpenVinoEngine) -> None:
    backend, sibling = on_engine(engine), on_engine(engine)
    for one in (backend, sibling):
        one.prefill(tokens(20), 0)
    backend.abort_next()
    with pytest.raises(EngineFault) as caught:
        backend.score(tokens(4), 20)
    assert caught.value.fatal_class is FatalClass.PREFILL_FAILED
    for call in (backend.take_mass, lambda: backend.score(tokens(4), 20)):
        with pytest.raises(EngineFault):
            call()
    oracle = oracle_of("llama")
    oracle.prefill(tokens(20), 0)
    assert_mass(sibling.score(tokens(4), 20), oracle.score(tokens(4), 20), TOLERANCE)
    assert_mass(sibling.take_mass(), oracle.take(), TOLERANCE)


# --- the softmax on its own ----------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 150), st.integers(0, 90), st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(0, 2**32)
)
def test_head_mass_is_the_softmax_in_float64(
    n_new: int, n_old: int, kv_heads: int, group: int, shuffled: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    place = np.arange(n_old + n_new)
    if shuffled:
        place = rng.permutation(place)
    queries = rng.standard_normal((n_new, kv_heads * group, 8)).astype(np.float32) * 2
    keys = rng.standard_normal((n_old + n_new, kv_heads, 8)).astype(np.float32)
    got = head_mass(queries, keys, place[n_old:], place)
    dots = np.einsum("thd,nhd->htn", queries.astype(np.float64), np.repeat(keys, group, axis=1)) / np.sqrt(8)
    dots[:, place[None, :] > place[n_old:, None]] = -np.inf
    weights = np.exp(dots - dots.max(axis=2, keepdims=True))
    want = (weights / weights.sum(axis=2, keepdims=True)).sum(axis=1)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE)


def test_memory_is_that_of_a_block_of_queries() -> None:
    """2048 queries of 9 heads over 4096 keys have 302 MB of weights."""
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((2048, 9, 16)).astype(np.float32)
    keys = rng.standard_normal((4096, 3, 16)).astype(np.float32)
    tracemalloc.start()
    mass = head_mass(queries, keys, 2048 + np.arange(2048), np.arange(4096))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32e6
    np.testing.assert_allclose(mass.sum(axis=1), 2048, rtol=1e-5)
