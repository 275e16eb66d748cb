"""What an OpenVINO session computes and keeps, on tiny f32 models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtape.backends.errors import (
    ContextOverflow,
    InputRejected,
    KvtapeError,
    SessionClosed,
    StateRejected,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.session import OpenVinoBackend
from kvtape.planner.layout import Segment
from kvtape.planner.ranges import RangeSet
from support.openvino_tiny import assert_whole, same_rows, tiny_engine, tiny_path, tiny_session, tokens
from support.oracle import OracleModel, OracleSession

TOLERANCE = 1e-5
"""Largest difference of f32 logits and rows to the float64 oracle."""
MODELS = ("llama", "llama-two-kv-heads", "qwen2", "qwen3")


def greedy(logits: np.ndarray) -> int:
    return int(logits.argmax())


def given(ids: list[int]) -> Callable[[np.ndarray], int | None]:
    """A choice that feeds `ids`, whatever the logits."""
    left = iter(ids)
    return lambda _logits: next(left, None)


@pytest.mark.parametrize("model", MODELS)
def test_logits_and_rows_agree_with_the_oracle(model: str) -> None:
    ids = tokens(40)
    backend = tiny_session(model, chunk=7)
    oracle = OracleSession(OracleModel(tiny_path(model)))
    computed = backend.prefill(ids[:30], 0)
    want = oracle.prefill(ids, 0)
    np.testing.assert_allclose(computed.logits, want[29], atol=TOLERANCE)
    assert (computed.calls, computed.tokens) == (math.ceil(30 / 7), 30)
    for n in range(30, 40):
        run = backend.decode_until(1, 512, n, computed.logits, given([ids[n]]))
        np.testing.assert_allclose(run.logits, want[n], atol=TOLERANCE)
    rows = backend.witness().rows
    for layer in range(2):
        keys = [oracle.model.rotate(r.keys[layer], r.cache).ravel() for r in oracle.rows.values()]
        values = [r.values[layer].ravel() for r in oracle.rows.values()]
        np.testing.assert_allclose(rows.keys[layer], keys, atol=TOLERANCE)
        np.testing.assert_allclose(rows.values[layer], values, atol=TOLERANCE)


@pytest.mark.parametrize("model", MODELS)
def test_every_kind_of_surgery_agrees_with_the_oracle(model: str) -> None:
    """Gap, shift, admit in place and appended, refill, truncate; then two more tokens."""
    ids = tokens(40)
    backend, oracle = tiny_session(model), OracleSession(OracleModel(tiny_path(model)))

    def continues(next_tape: int) -> None:
        more = tokens(2, seed=next_tape)
        got, want = backend.prefill(more, next_tape), oracle.prefill(more, next_tape)
        np.testing.assert_allclose(got.logits, want[-1], atol=TOLERANCE)

    backend.prefill(ids, 0)
    oracle.prefill(ids, 0)
    block = backend.export_block(8, 16)
    backend.evict(8, 16)
    rows = oracle.evict(8, 16)
    continues(40)
    backend.shift(16, 42, -8)
    oracle.shift(16, 42, -8)
    continues(42)
    backend.admit(block, 8, 36)
    oracle.admit(rows, 8, 36)
    continues(44)
    assert backend.books() == (
        Segment(0, 8, 0),
        Segment(16, 28, 8),
        Segment(8, 8, 36),
        Segment(44, 2, 44),
    )
    backend.evict(20, 24)
    oracle.evict(20, 24)
    np.testing.assert_allclose(
        backend.refill(ids[20:24], 20, 12).logits, oracle.refill(ids[20:24], 20, 12), atol=TOLERANCE
    )
    continues(46)
    backend.truncate(30)
    oracle.truncate(30)
    continues(48)
    kept = [(0, 5), (20, 30)]
    np.testing.assert_allclose(
        backend.rebuild(RangeSet(kept), ids[:5] + ids[20:30]).logits,
        oracle.rebuild(kept, ids[:5] + ids[20:30]),
        atol=TOLERANCE,
    )
    continues(50)
    assert_whole(backend)


@pytest.mark.parametrize("config", [{}, {"kv_type_k": "f16", "kv_type_v": "f16", "options": {"kv": "asked"}}])
def test_a_block_admitted_in_place_leaves_no_trace(config: dict[str, Any]) -> None:
    ids = tokens(50)
    touched, untouched = tiny_session(**config), tiny_session(**config)
    for backend in (touched, untouched):
        backend.prefill(ids[:40], 0)
    block = touched.export_block(10, 30)
    touched.evict(10, 30)
    assert not same_rows(touched, untouched)
    touched.admit(block, 10, 10)
    assert same_rows(touched, untouched)
    logits = [b.prefill(ids[40:], 40).logits for b in (touched, untouched)]
    np.testing.assert_array_equal(*logits)
    assert same_rows(touched, untouched)


def test_a_block_survives_a_closed_hole_with_every_bit() -> None:
    """Out at 10, in at 38, out again, hole opened, back at 10: keys are always turned from the original ones."""
    touched, untouched = tiny_session(), tiny_session()
    for backend in (touched, untouched):
        backend.prefill(tokens(40), 0)
    block = touched.export_block(10, 12)
    touched.evict(10, 12)
    for _ in range(20):
        touched.shift(12, 40, -2)
        touched.admit(block, 10, 38)
        block = touched.export_block(10, 12)
        touched.evict(10, 12)
        touched.shift(10, 38, 2)
    touched.admit(block, 10, 10)
    assert same_rows(touched, untouched)


@pytest.mark.parametrize("options", [{}, {"mirror": "off"}, {"kv": "asked"}, {"kv": "asked", "mirror": "off"}])
def test_a_restored_session_goes_on_bit_by_bit(options: dict[str, str]) -> None:
    live, other = tiny_session(options=options), tiny_session(options=options)
    live.prefill(tokens(30), 0)
    if live.capabilities.position_shift:
        live.evict(5, 9)
        live.shift(9, 30, -4)
    saved = live.snapshot()
    other.prefill(tokens(60, seed=5), 3)
    other.restore(saved)
    assert same_rows(live, other)
    assert live.books() == other.books()
    ran = [b.decode_until(12, 512, 31, b.prefill([7], 30).logits, greedy) for b in (live, other)]
    assert ran[0].tokens == ran[1].tokens
    np.testing.assert_array_equal(ran[0].logits, ran[1].logits)
    live.restore(saved)
    assert live.snapshot() == saved


def test_runs_repeat_and_threads_of_sessions_do_not_mix() -> None:
    """Three sessions in turns on one compiled model against one after the other."""
    ids = [tokens(33, seed=s) for s in range(3)]
    mixed = [tiny_session() for _ in ids]
    for at in range(0, 33, 11):
        for backend, own in zip(mixed, ids, strict=True):
            backend.prefill(own[at : at + 11], at)
            if at == 11:
                backend.evict(3, 7)
    for backend, own in zip(mixed, ids, strict=True):
        alone = tiny_session()
        for at in range(0, 33, 11):
            alone.prefill(own[at : at + 11], at)
            if at == 11:
                alone.evict(3, 7)
        assert same_rows(alone, backend)


def test_decoding_stops_for_a_stated_reason() -> None:
    backend = tiny_session()
    logits = backend.prefill(tokens(10), 0).logits
    run = backend.decode_until(3, 512, 10, logits, greedy)
    assert (len(run.tokens), run.calls, run.stopped) == (3, 3, "n")
    run = backend.decode_until(9, 15, 13, run.logits, greedy)
    assert (len(run.tokens), run.stopped) == (2, "limit")
    run = backend.decode_until(9, 512, 15, run.logits, given([5]))
    assert (run.tokens, run.stopped) == ((5,), "chosen_none")
    run = backend.decode_until(0, 512, 16, run.logits, greedy)
    assert (run.tokens, run.calls, run.stopped) == ((), 0, "n")
    assert backend.books() == (Segment(0, 16, 0),)


def test_the_effective_context_is_enforced() -> None:
    backend = tiny_session(n_ctx=250, chunk=300)
    logits = backend.prefill(tokens(256), 0).logits
    assert backend.decode_until(5, 999, 256, logits, greedy).stopped == "limit"
    with pytest.raises(ContextOverflow) as caught:
        backend.prefill(tokens(2), 256)
    assert (caught.value.needed, caught.value.available) == (258, 256)
    block = backend.export_block(100, 120)
    backend.evict(100, 120)
    backend.prefill(tokens(20), 256)
    with pytest.raises(ContextOverflow):
        backend.admit(block, 100, 100)
    with pytest.raises(ContextOverflow):
        backend.refill(tokens(20), 100, 100)
    with pytest.raises(ContextOverflow):
        backend.rebuild(RangeSet([(0, 300)]), tokens(300))


def test_an_emptied_cache_begins_again() -> None:
    backend = tiny_session()
    first = backend.prefill(tokens(9), 0).logits
    backend.evict(0, 9)
    assert backend.books() == ()
    assert_whole(backend)
    np.testing.assert_array_equal(backend.prefill(tokens(9), 9).logits, first)
    assert backend.books() == (Segment(9, 9, 0),)
    computed = backend.rebuild(RangeSet(), [])
    assert (computed.calls, computed.tokens, computed.logits.shape) == (0, 0, (0,))
    assert backend.books() == ()
    np.testing.assert_array_equal(backend.prefill(tokens(9), 0).logits, first)


BAD: dict[str, tuple[type[KvtapeError], Callable[[OpenVinoBackend], object]]] = {
    "no tokens": (InputRejected, lambda b: b.prefill([], 20)),
    "token past the vocabulary": (InputRejected, lambda b: b.prefill([5, b.facts.n_vocab], 20)),
    "negative token": (InputRejected, lambda b: b.prefill([-1], 20)),
    "huge token": (InputRejected, lambda b: b.prefill([2**40], 20)),
    "token that is no integer": (InputRejected, lambda b: b.prefill([1.0], 20)),  # type: ignore[list-item]
    "bool as token": (InputRejected, lambda b: b.prefill([True], 20)),
    "tape position resident already": (InputRejected, lambda b: b.prefill([5, 6], 19)),
    "negative tape position": (InputRejected, lambda b: b.prefill([5], -1)),
    "chosen token past the vocabulary": (
        InputRejected,
        lambda b: b.decode_until(4, 512, 20, np.zeros(9, np.float32), given([5, 6, 99999])),
    ),
    "negative decode": (InputRejected, lambda b: b.decode_until(-1, 512, 20, np.zeros(9, np.float32), greedy)),
    "decode onto resident tape": (InputRejected, lambda b: b.decode_until(4, 512, 3, np.zeros(9, np.float32), greedy)),
    "evict beyond the rows": (InputRejected, lambda b: b.evict(10, 21)),
    "evict nothing": (InputRejected, lambda b: b.evict(4, 4)),
    "evict backwards": (InputRejected, lambda b: b.evict(9, 4)),
    "export of what is not there": (InputRejected, lambda b: b.export_block(50, 52)),
    "shift of nothing": (InputRejected, lambda b: b.shift(30, 40, -1)),
    "shift by nothing": (InputRejected, lambda b: b.shift(3, 9, 0)),
    "shift onto another row": (InputRejected, lambda b: b.shift(5, 20, -2)),
    "shift below zero": (InputRejected, lambda b: b.shift(0, 20, -1)),
    "shift past what f32 counts": (InputRejected, lambda b: b.shift(0, 20, 1 << 24)),
    "refill of resident rows": (InputRejected, lambda b: b.refill([4], 3, 20)),
    "refill into a taken place": (InputRejected, lambda b: b.refill([4], 20, 3)),
    "refill at a negative place": (InputRejected, lambda b: b.refill([4], 20, -3)),
    "rebuild with too few tokens": (InputRejected, lambda b: b.rebuild(RangeSet([(0, 3)]), [4, 5])),
    "admit of noise": (StateRejected, lambda b: b.admit(b"noise" * 30, 30, 30)),
    "admit into a taken place": (InputRejected, lambda b: _admit_twice(b, 3)),
    "admit of resident rows": (InputRejected, lambda b: b.admit(b.export_block(3, 5), 3, 40)),
    "admit under another name": (StateRejected, lambda b: b.admit(b.export_block(3, 5), 40, 40)),
    "admit of a snapshot": (StateRejected, lambda b: b.admit(b.snapshot(), 0, 40)),
    "admit of another storage type": (StateRejected, lambda b: b.admit(_foreign_block(_F16), 40, 40)),
    "admit of another model": (StateRejected, lambda b: b.admit(_foreign_block({}, "qwen2"), 40, 40)),
    "restore of a block": (StateRejected, lambda b: b.restore(b.export_block(3, 5))),
    "restore of a cut snapshot": (StateRejected, lambda b: b.restore(b.snapshot()[:-9])),
    "restore of more than fits": (StateRejected, lambda b: b.restore(_long_snapshot())),
}
_F16: dict[str, Any] = {"kv_type_k": "f16", "kv_type_v": "f16", "options": {"kv": "asked"}}


def _admit_twice(backend: OpenVinoBackend, at: int) -> None:
    other = tiny_session()
    other.prefill(tokens(4), 40)
    backend.admit(other.export_block(40, 44), 40, at)


def _foreign_block(config: dict[str, Any], model: str = "llama") -> bytes:
    other = tiny_session(model, **config)
    other.prefill(tokens(4), 40)
    return other.export_block(40, 44)


def _long_snapshot() -> bytes:
    other = tiny_session(n_ctx=1024, chunk=600)
    other.prefill(tokens(600), 0)
    return other.snapshot()


@pytest.mark.parametrize("case", BAD)
def test_bad_input_changes_nothing(case: str) -> None:
    error, attempt = BAD[case]
    backend, twin = tiny_session(), tiny_session()
    for b in (backend, twin):
        b.prefill(tokens(20), 0)
    with pytest.raises(error):
        attempt(backend)
    assert backend.books() == twin.books() == (Segment(0, 20, 0),)
    assert same_rows(backend, twin)
    np.testing.assert_array_equal(backend.prefill([9], 20).logits, twin.prefill([9], 20).logits)


def test_a_closed_session_is_closed() -> None:
    backend = tiny_session()
    backend.prefill(tokens(4), 0)
    backend.close()
    backend.close()
    calls: list[Callable[[], object]] = [
        lambda: backend.prefill([4], 4),
        backend.books,
        backend.witness,
        backend.snapshot,
        backend.kv_bytes,
    ]
    for call in calls:
        with pytest.raises(SessionClosed):
            call()


def test_a_closed_engine_opens_nothing() -> None:
    engine = OpenVinoEngine.load(tiny_path("llama"), {"mirror": "off"})
    backend = engine.open(dataclasses.replace(tiny_session().config, options={}))
    assert backend.capabilities.remove_middle is False
    engine.close()
    engine.close()
    with pytest.raises(SessionClosed):
        backend.prefill([4], 0)
    with pytest.raises(SessionClosed):
        engine.open(backend.config)


def test_options_of_the_session_win_over_those_of_the_engine() -> None:
    engine = OpenVinoEngine.load(tiny_path("llama"), {"mirror": "off"})
    asked = dataclasses.replace(tiny_session().config, options={"mirror": "on"})
    assert engine.open(asked).capabilities.remove_middle is True
    with pytest.raises(UsageError, match="allowed: inference, kv, memory, mirror, scores, trained"):
        OpenVinoEngine.load(tiny_path("llama"), {"mirro": "off"})


def test_sessions_of_one_profile_share_a_compiled_model() -> None:
    facts = tiny_engine("llama").facts
    assert (facts.arch, facts.n_vocab, facts.end_tokens) == ("llama", 320, frozenset({2}))
    one, other, f16 = tiny_session(), tiny_session(chunk=3, options={"mirror": "off"}), tiny_session(**_F16)
    assert one._state.compiled is other._state.compiled
    assert one._state.compiled is not f16._state.compiled


def test_refused_operations_name_their_capability() -> None:
    with pytest.raises(UnsupportedOperation, match="remove_tail is false"):
        tiny_session(options={"mirror": "off"}).truncate(0)
