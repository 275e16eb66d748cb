"""Ctrl-C at any line of a call, and memory that ends: the session of before it, or StateInvalidated."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from kvtape.backends.reference.engines import session_engine
from kvtape.backends.reference.engines.code_store import CodeStore
from kvtape.backends.reference.engines.turbo_codec import BlockCodec
from kvtape.backends.reference.errors import StateInvalidated
from kvtape.backends.reference.model.ffn import LocalFfn
from support.reference import kv_engine, play, text, weights

# With the number of tokens behind which a window slides, grows cold or closes, or a chunk is whole, at the next step.
SPECS = {
    "boundary-kv:chunk=12": 11,
    "boundary-per-layer:window=12,codecs=q8_0": 12,
    "markov-rs": 11,
    "no-cache": 11,
    "standard": 11,
    "standard:window=12": 12,
    "tq4": 11,
    "windowed-checkpoint:window=12": 11,
}
# Modules that keep no state between calls: what they are interrupted in is a call of those that do.
_PURE = {
    *("architecture", "attention", "blas", "ffn", "feed_forward", "linear", "matrix", "normal", "rope", "row_codecs"),
    *("steps", "tokens", "turbo_codec", "weights"),
}
_FOLDER = str(Path(session_engine.__file__).parent)
_LAST = 14
_STRIDE = 23


class _Interrupt:
    """Raises at the `at`-th line that runs outside `_PURE` modules; counts them where it is never reached."""

    def __init__(self, at: int) -> None:
        self.at, self.lines = at, 0

    def call(self, what: Callable[[], Any]) -> None:
        before = sys.gettrace()
        sys.settrace(self._frame)
        try:
            what()
        finally:
            sys.settrace(before)

    def _frame(self, frame: FrameType, event: str, arg: Any) -> Any:
        path = Path(frame.f_code.co_filename)
        return self._line if str(path.parent) == _FOLDER and path.stem not in _PURE else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                raise KeyboardInterrupt
        return self._line


def _places(what: Callable[[], Any]) -> list[int]:
    """Lines to be interrupted at: a sample of all, and the last ones, where a step is taken over."""
    counted = _Interrupt(0)
    counted.call(what)
    return sorted({*range(1, counted.lines + 1, _STRIDE), *range(counted.lines - _LAST, counted.lines + 1)})


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("operation", ["step", "prefill"])
def test_an_interrupt_anywhere_leaves_the_session_or_says_that_it_is_lost(spec: str, operation: str) -> None:
    model, local, n = weights("llama"), LocalFfn(weights("llama")), SPECS[spec]
    want, engine = play(spec, model, text(n), 2), kv_engine(spec)

    def call() -> None:
        if operation == "step":
            engine.decode_step(model, local, want.tokens[0])
        else:
            engine.prefill(model, local, text(20, seed=9))

    engine.prefill(model, local, text(n))
    lost = 0
    for place in _places(call):
        engine.prefill(model, local, text(n))
        with pytest.raises((KeyboardInterrupt, StateInvalidated)):
            _Interrupt(place).call(call)
        try:
            hidden = [engine.decode_step(model, local, token)[0] for token in want.tokens]
        except StateInvalidated:
            lost += 1
        else:
            np.testing.assert_array_equal(hidden, want.hidden[1:], err_msg=f"line {place}")
    assert operation == "step" or not lost


def test_an_interrupt_while_a_step_is_taken_back_is_a_lost_state(monkeypatch: pytest.MonkeyPatch) -> None:
    model, local, engine = weights("llama"), LocalFfn(weights("llama")), kv_engine("standard")
    engine.prefill(model, local, text(11))

    def again(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(engine), "_step", again)
        patch.setattr(type(engine), "_rewind", again)
        with pytest.raises(KeyboardInterrupt):
            engine.decode_step(model, local, 5)
    for call in (lambda: engine.decode_step(model, local, 5), lambda: engine.read_kv_row(0, 3)):
        with pytest.raises(StateInvalidated, match="prefill the session again"):
            call()


def test_codes_are_kept_where_memory_for_more_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    store = CodeStore(BlockCodec(64, 64, 4))
    rows = np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32)
    store.append(store.encode(rows))
    before, more, real, calls = store.decoded(), store.encode(rows), np.empty, iter((0, 1))

    def full(*args: Any, **kwargs: Any) -> Any:
        if next(calls):
            raise MemoryError
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(np, "empty", full)
        with pytest.raises(MemoryError):
            store.append(more)
    np.testing.assert_array_equal(store.decoded(), before)
