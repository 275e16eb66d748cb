"""Any sequence of prefills, steps, faults, retries, copies and restores, each engine beside its kind's plain rule."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtape.backends.reference.engines.boundary_frame import BoundaryFrame
from kvtape.backends.reference.engines.boundary_kv import BoundaryKvEngine
from kvtape.backends.reference.engines.residual_engine import ResidualEngine
from kvtape.backends.reference.engines.session_engine import EngineSnapshot, SessionEngine
from kvtape.backends.reference.engines.windowed_checkpoint import WindowedCheckpointEngine
from kvtape.backends.reference.errors import BackendFailure, EmptyPrompt, ExecutionRefused, StateInvalidated
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.forward import forward
from support.kv_oracle import PlainSession
from support.reference import FailingFfn, kv_engine, text, weights
from support.reference_faults import STAGES, Planted, plant

Oracle = Callable[[tuple[int, ...], int], np.ndarray]
"""The last row behind the last layer, after these tokens of which the first so many were the prompt."""

TOKENS = st.integers(3, 300)


@functools.cache
def _exact(tokens: tuple[int, ...], n_prompt: int, window: int = 0) -> np.ndarray:
    return np.asarray(forward(weights("llama"), tokens, window=window)[-1])


@functools.cache
def _session(tokens: tuple[int, ...], n_prompt: int, rule: tuple[tuple[str, Any], ...]) -> tuple[PlainSession, Any]:
    """A plain session after these tokens, and its last row; made from the one that is a token shorter."""
    if len(tokens) == n_prompt:
        session = PlainSession(weights("llama"), **dict(rule))
        return session, session.tokens(list(tokens), prompt=True)
    session = _session(tokens[:-1], n_prompt, rule)[0].copy()
    return session, session.tokens(list(tokens[-1:]))


def _plain(tokens: tuple[int, ...], n_prompt: int, rule: tuple[tuple[str, Any], ...]) -> np.ndarray:
    return np.asarray(_session(tokens, n_prompt, rule)[1])


def exact(window: int = 0) -> Oracle:
    return functools.partial(_exact, window=window)


def plain(**rules: Any) -> Oracle:
    return functools.partial(_plain, rule=tuple(sorted(rules.items())))


class EngineMachine(RuleBasedStateMachine):
    spec: ClassVar[str]
    oracle: ClassVar[Oracle]

    @initialize(n=st.integers(1, 30), seed=st.integers(0, 9))
    def begin(self, n: int, seed: int) -> None:
        self.model = weights("llama")
        self.local = LocalFfn(self.model)
        engine = kv_engine(self.spec)
        assert isinstance(engine, SessionEngine)
        self.engine = engine
        self.copies: list[tuple[EngineSnapshot, tuple[int, ...], int]] = []
        self.prefill(n, seed)

    @rule(n=st.integers(1, 30), seed=st.integers(0, 9))
    def prefill(self, n: int, seed: int) -> None:
        self.tokens, self.n_prompt = tuple(text(n, seed)), n
        self._is_right(self.engine.prefill(self.model, self.local, list(self.tokens)))

    @rule(token=TOKENS)
    def step(self, token: int) -> None:
        hidden = self.engine.decode_step(self.model, self.local, token)
        self.tokens = (*self.tokens, token)
        self._is_right(hidden)

    @rule(n=st.integers(2, 14), seed=st.integers(0, 9))
    def steps(self, n: int, seed: int) -> None:
        for token in text(n, seed):
            hidden = self.engine.decode_step(self.model, self.local, token)
            self.tokens = (*self.tokens, token)
        self._is_right(hidden)

    @rule(token=TOKENS, other=TOKENS, stage=st.sampled_from(STAGES), layer=st.integers(0, 1), n=st.integers(1, 3))
    def failed_steps_and_a_retry(self, token: int, other: int, stage: str, layer: int, n: int) -> None:
        """The failed token need not be the one that comes then."""
        for _ in range(n):
            with pytest.MonkeyPatch.context() as patch:
                plant(patch, stage, layer)
                with pytest.raises(Planted):
                    self.engine.decode_step(self.model, self.local, other)
        self.step(token)

    @rule(n=st.integers(1, 30), layer=st.integers(0, 1))
    def a_failed_prefill(self, n: int, layer: int) -> None:
        with pytest.raises(BackendFailure):
            self.engine.prefill(self.model, FailingFfn(self.model, layer), text(n, seed=5))

    @rule()
    def copy(self) -> None:
        self.copies.append((self.engine.snapshot(), self.tokens, self.n_prompt))

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), fresh=st.booleans())
    def go_on_from_a_copy(self, data: st.DataObject, *, fresh: bool) -> None:
        """In this engine or in a new one; a copy may be used many times."""
        snapshot, self.tokens, self.n_prompt = data.draw(st.sampled_from(self.copies))
        if fresh:
            engine = kv_engine(self.spec)
            assert isinstance(engine, SessionEngine)
            self.engine = engine
        self.engine.restore(snapshot)
        assert self.engine.handle().n_tokens == snapshot.n_tokens == len(self.tokens)

    @precondition(lambda self: isinstance(self.engine, ResidualEngine))
    @rule()
    def forget_what_is_derived(self) -> None:
        assert isinstance(self.engine, ResidualEngine)
        self.engine.forget_derived()

    @precondition(lambda self: isinstance(self.engine, WindowedCheckpointEngine) and self.engine.n_closed)
    @rule(data=st.data())
    def replay(self, data: st.DataObject) -> None:
        assert isinstance(self.engine, WindowedCheckpointEngine)
        window = data.draw(st.integers(0, self.engine.n_closed - 1))
        again = self.engine.replay(self.model, self.local, window)
        np.testing.assert_array_equal(again.hidden[-1], self.oracle(self.tokens[: again.stop], again.stop))

    @precondition(lambda self: isinstance(self.engine, BoundaryKvEngine) and len(self.tokens) > 12)
    @rule()
    def resume(self) -> None:
        """A new session from the frames of a prefill of the same text, as bytes, and the tokens behind the last."""
        assert isinstance(self.engine, BoundaryKvEngine)
        other = kv_engine(self.spec)
        assert isinstance(other, BoundaryKvEngine)
        other.prefill(self.model, self.local, list(self.tokens))
        frames = [BoundaryFrame.from_bytes(frame.to_bytes()) for frame in other.take_frames()]
        self._is_right(self.engine.resume(self.model, self.local, frames, self.tokens[frames[-1].stop :]))
        self.n_prompt = len(self.tokens)

    @invariant()
    def the_books_add_up(self) -> None:
        if not hasattr(self, "tokens"):
            return
        memory = self.engine.memory()
        assert self.engine.handle().n_tokens == len(self.tokens)
        assert 1 <= memory.reachable_tokens <= len(self.tokens)
        if self.engine.window_tokens:
            assert memory.reachable_tokens <= self.engine.window_tokens
        assert all(0 <= kind.occupied <= kind.allocated for kind in memory.kinds)
        held = [p for p in range(len(self.tokens)) if self.engine.read_kv_row(1, p) is not None]
        assert len(held) == memory.rows

    def _is_right(self, hidden: np.ndarray) -> None:
        np.testing.assert_array_equal(hidden[0], self.oracle(self.tokens, self.n_prompt))


def _case(engine: str, oracle_of_it: Oracle) -> Any:
    """The machine for one spec, as a test case."""

    class Machine(EngineMachine):
        spec = engine
        oracle = staticmethod(oracle_of_it)

    Machine.TestCase.settings = settings(max_examples=6, stateful_step_count=12, deadline=None)
    return Machine.TestCase


TestNoCache = _case("no-cache", exact())
TestStandard = _case("standard", exact())
TestStandardWindow = _case("standard:window=12", exact(window=12))
TestBoundaryKv = _case("boundary-kv:chunk=12", exact())
TestMarkov = _case("markov-rs", exact())
TestMarkovWindow = _case("markov-rs:window=12", exact())
TestMarkovCodec = _case("markov-rs-codec:window=12", plain(cold_after=12, codecs="bf16"))
TestPerLayer = _case("boundary-per-layer:window=12,codecs=bf16x1+q8_0", plain(cold_after=12, codecs="bf16x1+q8_0"))
TestWindowedCheckpoint = _case("windowed-checkpoint:window=12", plain(window=12))


def test_a_copy_is_of_one_engine_and_its_options() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine, other = kv_engine("markov-rs:window=12"), kv_engine("markov-rs:window=13")
    assert isinstance(engine, SessionEngine)
    assert isinstance(other, SessionEngine)
    with pytest.raises(EmptyPrompt, match="no session to copy"):
        engine.snapshot()
    engine.prefill(model, local, text(20))
    other.prefill(model, local, text(9))
    with pytest.raises(ExecutionRefused, match="window=13 cannot go on from a copy of markov-rs:window=12") as refused:
        other.restore(engine.snapshot())
    assert refused.value.kind == "binding_defect"
    assert other.handle().n_tokens == 9
    with pytest.raises(ExecutionRefused, match="other weights"):
        engine.decode_step(weights("qwen3"), local, 5)


def test_a_copy_brings_a_lost_session_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = kv_engine("standard")
    assert isinstance(engine, SessionEngine)
    engine.prefill(model, local, text(20))
    copy = engine.snapshot()
    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "_rewind", _fails)
        with pytest.raises(StateInvalidated):
            engine.decode_step(model, FailingFfn(model, 0), 5)
    engine.restore(copy)
    np.testing.assert_array_equal(engine.decode_step(model, local, 5)[0], _exact((*text(20), 5), 20))


def _fails(engine: SessionEngine) -> None:
    raise RuntimeError("as planned")
