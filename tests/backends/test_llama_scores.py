"""Attention from the engine's soft-max nodes: the float64 oracle's, at tape positions, through every surgery."""

from __future__ import annotations

import signal
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
    InputRejected,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.llama import attention
from kvtape.backends.llama.attention import AttentionTap, CellSums
from kvtape.backends.llama.context import LIVE, SCRATCH, ContextParams, NativeContext
from kvtape.backends.llama.native import NativeModel
from kvtape.backends.llama.session import LlamaBackend
from kvtape.planner.ranges import RangeSet
from support.attention import ScoredOracle, assert_mass, whole_mass
from support.llama_tiny import image, model_file, session, tokens
from support.oracle import OracleModel

TOLERANCE = dict.fromkeys(("llama", "qwen2", "qwen3"), 1e-5) | {"qwen2vl": 1e-4}
"""Of a row's mass, which is 1 to 15 here; the engine's angles of M-RoPE are less exact."""
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"n_head": 4, "n_head_kv": 2, "head_dim": 32},
    "qwen2": {},
    "qwen2vl": {},
    "qwen3": {"n_head": 4, "n_head_kv": 1, "head_dim": 32},
}
TAPE = tokens(400, seed=5)


def scored(arch: str = "llama", **config: Any) -> LlamaBackend:
    options = {"scores": "on", **config.pop("options", {})}
    return session(arch, config={"n_ctx": 256, **config, "options": options}, **SHAPES[arch])


class Pair:
    """A session and the oracle, driven alike; tokens come from `TAPE`."""

    def __init__(self, arch: str, **config: Any) -> None:
        self.backend = scored(arch, **config)
        self.oracle = ScoredOracle(OracleModel(model_file(arch, **SHAPES[arch])))
        self.tolerance = TOLERANCE[arch]
        self.length = 0

    def prefill(self, n: int) -> None:
        new = TAPE[self.length : self.length + n]
        self.backend.prefill(new, self.length)
        self.oracle.prefill(new, self.length)
        self.length += n

    def decode(self, n: int) -> None:
        new = TAPE[self.length : self.length + n]
        coming = iter(new)
        self.backend.decode_until(n, 256, self.length, np.zeros(1, np.float32), lambda _: next(coming))
        self.oracle.prefill(new, self.length)
        self.length += n

    def evict(self, start: int, stop: int) -> tuple[bytes, list[Any]]:
        block = self.backend.export_block(start, stop)
        self.backend.evict(start, stop)
        return block, self.oracle.evict(start, stop)

    def shift(self, start: int, stop: int, delta: int) -> None:
        self.backend.shift(start, stop, delta)
        self.oracle.shift(start, stop, delta)

    def admit(self, block: tuple[bytes, list[Any]], start: int, cache_start: int) -> None:
        self.backend.admit(block[0], start, cache_start)
        self.oracle.admit(block[1], start, cache_start)

    def refill(self, start: int, stop: int) -> None:
        self.backend.refill(TAPE[start:stop], start, start)
        self.oracle.refill(TAPE[start:stop], start, start)

    def rebuild(self, *pairs: tuple[int, int]) -> None:
        survivors = [t for start, stop in pairs for t in TAPE[start:stop]]
        self.backend.rebuild(RangeSet(pairs), survivors)
        self.oracle.rebuild(pairs, survivors)

    def truncate(self, stop: int) -> None:
        self.backend.truncate(stop)
        self.oracle.truncate(stop)
        self.length = stop

    def check_score(self, n: int, tape_start: int, layers: list[int] | None = None) -> None:
        got = self.backend.score(TAPE[tape_start : tape_start + n], tape_start, layers)
        assert_mass(got, self.oracle.score(TAPE[tape_start : tape_start + n], tape_start), self.tolerance, layers)

    def check_take(self) -> None:
        assert_mass(self.backend.take_mass(), self.oracle.take(), self.tolerance)


def whole_prompt(p: Pair) -> None:
    p.prefill(50)
    p.decode(5)


def gap(p: Pair) -> None:
    p.prefill(50)
    p.evict(4, 25)
    p.decode(3)
    p.evict(30, 34)
    p.prefill(15)


def rebased(p: Pair) -> None:
    p.prefill(50)
    p.evict(4, 25)
    p.shift(25, 50, -21)
    p.decode(3)
    p.prefill(10)
    p.shift(0, 42, 5)


def admitted_in_place(p: Pair) -> None:
    p.prefill(50)
    block = p.evict(10, 20)
    p.decode(3)
    p.admit(block, 10, 10)
    p.decode(3)


def admitted_at_the_end(p: Pair) -> None:
    p.prefill(50)
    block = p.evict(10, 20)
    p.prefill(12)
    p.admit(block, 10, 62)
    p.decode(3)


def refilled(p: Pair) -> None:
    p.prefill(40)
    p.evict(10, 20)
    p.decode(3)
    p.refill(10, 20)
    p.decode(2)


def rebuilt(p: Pair) -> None:
    p.prefill(40)
    p.rebuild((0, 4), (20, 40))
    p.decode(3)


def truncated(p: Pair) -> None:
    """Other tokens come to stand where rows with mass stood."""
    p.prefill(40)
    p.evict(5, 10)
    p.truncate(25)
    p.prefill(20)


def restored(p: Pair) -> None:
    p.prefill(30)
    p.evict(5, 10)
    saved = p.backend.snapshot(), p.oracle.snapshot()
    p.decode(3)
    p.backend.restore(saved[0])
    p.oracle.restore(saved[1])
    p.length = 30
    p.prefill(10)


def saved(p: Pair) -> None:
    """A snapshot puts the cells into another order; rows keep what they have."""
    p.prefill(40)
    p.evict(5, 20)
    p.prefill(10)
    p.backend.snapshot()
    p.decode(3)


SCENARIOS = {
    f.__name__: f
    for f in (
        whole_prompt,
        gap,
        rebased,
        admitted_in_place,
        admitted_at_the_end,
        refilled,
        rebuilt,
        truncated,
        restored,
        saved,
    )
}
CASES = [("llama", name) for name in SCENARIOS]
CASES += [(arch, f.__name__) for arch in ("qwen2", "qwen2vl", "qwen3") for f in (gap, admitted_in_place)]
CASES += [("qwen2", "rebased"), ("qwen3", "rebased")]


@pytest.mark.parametrize(("arch", "scenario"), CASES, ids=["-".join(c) for c in CASES])
def test_mass_and_scores_are_the_oracles(arch: str, scenario: str) -> None:
    pair = Pair(arch)
    SCENARIOS[scenario](pair)
    pair.check_score(6, pair.length)
    pair.check_score(8, pair.length - 8, [1])
    pair.check_take()
    pair.decode(1)
    pair.check_take()


@pytest.mark.parametrize(("chunk", "n_ubatch"), [(64, 8), (16, 16), (7, 3), (2, 1)])
def test_pieces_change_nothing(chunk: int, n_ubatch: int) -> None:
    pair = Pair("llama", chunk=chunk, options={"n_ubatch": str(n_ubatch)})
    pair.prefill(40)
    pair.check_score(20, 40)
    pair.check_take()


def test_the_whole_mass() -> None:
    backend = scored()
    backend.prefill(TAPE[:70], 0)
    mass = backend.take_mass()
    np.testing.assert_allclose(whole_mass(mass), 4 * 70, rtol=1e-5)
    assert np.all(mass.peak <= mass.mass)
    assert np.all(mass.peak >= mass.mass / 4 - 1e-6)
    assert backend.take_mass().n_queries == 0
    assert not backend.take_mass().mass.any()


def test_a_probe_pays_what_the_same_tokens_pay_when_they_come() -> None:
    backend = scored()
    backend.prefill(TAPE[:60], 0)
    backend.evict(10, 30)
    probe = backend.score(TAPE[60:70], 60)
    backend.take_mass()
    backend.prefill(TAPE[60:70], 60)
    real = backend.take_mass()
    resident = np.isin(real.tape_positions, probe.tape_positions)
    np.testing.assert_array_equal(real.mass[:, resident], probe.mass)


def test_nothing_before_the_probe() -> None:
    backend = scored()
    for mass in (backend.score(TAPE[:5], 0), backend.score(TAPE[:5], 7)):
        assert (mass.mass.shape, mass.n_queries) == ((2, 0), 5)
    assert backend.take_mass().mass.shape == (2, 0)


def test_a_window_behind_a_hole_is_refused() -> None:
    backend = scored()
    backend.prefill(TAPE[:60], 0)
    backend.evict(30, 40)
    before = image(backend)
    with pytest.raises(UnsupportedOperation, match="no row stands before cache position 40"):
        backend.score(TAPE[40:60], 40)
    assert image(backend) == before
    backend.score(TAPE[41:60], 41)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 60), "no tokens"),
        (([10**6], 60), "not in the vocabulary"),
        (([5], -1), "tape position -1"),
        (([5], 60, []), r"layers \[\]"),
        (([5], 60, [1, 2]), r"layers \[1, 2\]: choose from 0 to 1"),
    ],
)
def test_bad_input_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    backend = scored()
    backend.prefill(TAPE[:60], 0)
    with pytest.raises(InputRejected, match=message):
        backend.score(*arguments)
    backend.score([5], 60)


def test_a_probe_that_does_not_fit() -> None:
    backend = scored()
    backend.prefill((TAPE * 2)[:256], 0)
    backend.score(TAPE[:256], 256)
    before = image(backend)
    with pytest.raises(ContextOverflow, match="513 tokens do not fit a context of 512"):
        backend.score(TAPE[:257], 256)
    assert image(backend) == before


# -- a probe leaves nothing behind -----------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_scoring_leaves_nothing_behind(data: st.DataObject) -> None:
    """Against a session without scores: the same cells in the same order, the same bytes, the same logits."""
    pair = (scored("llama", chunk=16), session("llama", config={"n_ctx": 256, "chunk": 16}, **SHAPES["llama"]))
    length, logits = 0, []
    for _ in range(data.draw(st.integers(2, 8))):
        n = data.draw(st.integers(1, 40))
        if sum(s.length for s in pair[0].books()) + n > 256:
            break
        logits.append([backend.prefill(TAPE[length : length + n], length).logits for backend in pair])
        length += n
        start = data.draw(st.integers(0, length - 1))
        inside = [s for s in pair[0].books() if s.tape_start <= start < s.tape_stop]
        if inside and data.draw(st.booleans()):
            stop = data.draw(st.integers(start + 1, inside[0].tape_stop))
            end = max(s.cache_stop for s in pair[0].books())
            close = data.draw(st.booleans()) and stop < inside[0].tape_stop
            at = inside[0].cache_start - inside[0].tape_start
            for backend in pair:
                backend.evict(start, stop)
                if close:
                    backend.shift(stop + at, end, start - stop)
        if data.draw(st.booleans()):
            where = data.draw(st.sampled_from([length, *range(0, length, 7)]))
            try:
                pair[0].score(TAPE[: data.draw(st.integers(1, 50))], where)
            except UnsupportedOperation:
                assert where < length
    for on, off in logits:
        np.testing.assert_array_equal(on, off)
    assert pair[0].books() == pair[1].books()
    assert pair[0]._context.position_max(SCRATCH) == -1
    states = [image(backend) and backend._context.read_sequence(LIVE) for backend in pair]
    assert states[0] == states[1]
    for backend in pair:
        backend.close()


def test_a_probe_is_not_counted() -> None:
    pair = Pair("llama")
    pair.prefill(40)
    pair.backend.score(TAPE[:30], 40)
    pair.check_take()


# -- cancelling and failures -----------------------------------------------------------------------------------------


def interrupted_by(monkeypatch: pytest.MonkeyPatch, action: Callable[[], None]) -> None:
    """Do `action` while the fifth soft-max node is read."""
    real, seen = attention._weights, [0]

    def weights(tensor: Any) -> Any:
        seen[0] += 1
        if seen[0] == 5:
            action()
        return real(tensor)

    monkeypatch.setattr(attention, "_weights", weights)


def small_pieces() -> Pair:
    return Pair("llama", chunk=16, options={"n_ubatch": "4"})


@pytest.mark.parametrize("how", ["cancel", "interrupt"])
def test_what_a_stopped_operation_computed_does_not_count(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    pair = small_pieces()
    pair.prefill(40)
    before = image(pair.backend)
    stop = pair.backend.cancel if how == "cancel" else lambda: signal.raise_signal(signal.SIGINT)
    for operation in (lambda: pair.backend.prefill(TAPE[40:70], 40), lambda: pair.backend.score(TAPE[40:70], 40)):
        with monkeypatch.context() as patch:
            interrupted_by(patch, stop)
            with pytest.raises(Cancelled if how == "cancel" else KeyboardInterrupt):
                operation()
        assert image(pair.backend) == before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    pair.prefill(10)
    pair.check_score(9, 50)
    pair.check_take()


def test_a_cancelled_rebuild_keeps_what_was_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = small_pieces()
    pair.prefill(40)
    with monkeypatch.context() as patch:
        interrupted_by(patch, pair.backend.cancel)
        with pytest.raises(Cancelled):
            pair.backend.rebuild(RangeSet([(0, 30)]), TAPE[:30])
    pair.decode(2)
    pair.check_take()


def fail() -> None:
    raise ValueError("planted")


@pytest.mark.parametrize("operation", ["prefill", "score"])
def test_a_failure_to_read_is_a_failure_of_the_operation(monkeypatch: pytest.MonkeyPatch, operation: str) -> None:
    """The engine itself would go on and say nothing."""
    backend = small_pieces().backend
    backend.prefill(TAPE[:20], 0)
    interrupted_by(monkeypatch, fail)
    with pytest.raises(EngineFault, match=r"attention could not be read: ValueError\('planted'\)"):
        getattr(backend, operation)(TAPE[20:50], 20)
    with pytest.raises(EngineFault, match="planted"):
        backend.take_mass()


def test_a_node_that_was_missed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = scored()
    real = CellSums.add

    def forgetful(self: CellSums, layer: int, *rest: Any) -> None:
        if layer == 0:
            real(self, layer, *rest)

    monkeypatch.setattr(CellSums, "add", forgetful)
    with pytest.raises(EngineFault, match=r"attention of 20 queries, seen in each layer: \[20, 0\]"):
        backend.prefill(TAPE[:20], 0)


# -- options ---------------------------------------------------------------------------------------------------------


def test_flash_attention_has_no_weights_to_read() -> None:
    with pytest.raises(UsageError, match="scores=on needs it off"):
        scored(flash_attention="on")


def test_an_unknown_value_is_refused() -> None:
    with pytest.raises(UsageError, match="scores"):
        scored(options={"scores": "some"})


def test_no_callback_without_the_option() -> None:
    backend = session()
    assert backend._context._tap is None
    assert scored()._context._tap is not None


def test_another_tensor_layout_is_not_guessed_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_OVERHEAD", 376)
    backend = scored()
    assert not backend.capabilities.attention_scores
    assert "368 bytes, 376 are understood" in str(backend.refusal("attention_scores"))
    with pytest.raises(UnsupportedOperation, match="368 bytes"):
        backend.take_mass()


# -- learned sink weights --------------------------------------------------------------------------------------------


def gpt_oss_attention(sink_weight: float) -> tuple[Any, Any]:
    """Mass by layer and head `[2, n_heads, 40]`, and logits, of 40 tokens read at the tap itself.

    The model's layers are windowed in turn, so sessions report no scores; its window is longer than these tokens.
    """
    model = NativeModel(str(model_file("gpt-oss", sink_weight=sink_weight)))
    tap = AttentionTap()
    context = NativeContext(model, ContextParams(256, 64, 64, "f32", "f32", "off", 1, True), tap)
    sums = CellSums(256, frozenset({0, 1}))
    with tap.collect(sums):
        assert context.decode(np.array(TAPE[:40], np.int32), 0, LIVE, want_logits=True) == 0
    found = np.stack([sums.heads[layer][:, sums.visible_cells] for layer in (0, 1)]), context.logits()
    context.close()
    model.close()
    return found


def test_learned_sink_weights_take_attention_from_the_rows() -> None:
    """A learned sink is a logit without a row: the rest of every softmax shrinks, and no row receives it."""
    without, plain_logits = gpt_oss_attention(-1e4)
    np.testing.assert_allclose(without.sum(axis=2), 40, rtol=1e-5)
    with_sinks, logits = gpt_oss_attention(1.0)
    assert np.all(with_sinks.sum(axis=2) < 0.95 * 40)
    # Layer 0 sees the same inputs, so there no row gains.
    assert np.all(with_sinks[0] <= without[0] + 1e-6)
    assert np.abs(logits - plain_logits).max() > 1e-3


def test_a_model_with_windows_and_sinks_reports_no_scores() -> None:
    backend = session("gpt-oss", config={"options": {"scores": "on"}})
    assert not backend.capabilities.attention_scores
    assert "windowed rows" in str(backend.refusal("attention_scores"))
