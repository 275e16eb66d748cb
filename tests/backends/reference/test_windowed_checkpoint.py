"""`windowed-checkpoint`: exact until the first close, and by its own rule after; windows that can be replayed."""

from __future__ import annotations

import numpy as np
import pytest

from kvtape.backends.reference.engines.engine import Contract, StateMask
from kvtape.backends.reference.engines.windowed_checkpoint import WindowedCheckpointEngine
from kvtape.backends.reference.errors import (
    BackendFailure,
    EmptyPrompt,
    ExecutionRefused,
    InvariantViolation,
    StateInvalidated,
)
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.pages import PAGE, PageStore
from support.kv_oracle import PlainSession
from support.reference import SHAPES, FailingFfn, kv_engine, play, text, weights


def windowed(window: int) -> WindowedCheckpointEngine:
    engine = kv_engine(f"windowed-checkpoint:window={window}")
    assert isinstance(engine, WindowedCheckpointEngine)
    return engine


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_exact_until_the_first_close_and_visibly_not_after(shape: str) -> None:
    """The window of 24 closes with the 24th token; the 25th sees two rows."""
    model, prompt = weights(shape), text(20)
    standard = play("standard", model, prompt, 8)
    engine, local = windowed(24), LocalFfn(weights(shape))
    hidden = [engine.prefill(model, local, prompt), *[engine.decode_step(model, local, t) for t in standard.tokens]]
    for i, row in enumerate(hidden):
        if 20 + i <= 24:
            np.testing.assert_array_equal(row[0], standard.hidden[i])
        else:
            assert np.abs(row[0] - standard.hidden[i]).max() > 0.05 * np.abs(standard.hidden[i]).max()
    assert engine.info.contract is Contract.EXACT_IN_WINDOW


@pytest.mark.parametrize(("window", "n"), [(1, 4), (7, 20), (7, 21), (16, 50)])
def test_every_window_sees_itself_and_the_last_row_of_the_one_before(window: int, n: int) -> None:
    """Held against the rule said plainly, token by token, to the bit; in a prefill and in steps."""
    model, prompt = weights("llama"), text(n)
    run = play(f"windowed-checkpoint:window={window}", model, prompt, 9)
    plain = PlainSession(model, window=window)
    want = [plain.tokens(prompt), *[plain.tokens([token]) for token in run.tokens]]
    np.testing.assert_array_equal(run.hidden, np.stack(want))


def test_how_a_text_is_cut_into_calls_changes_no_bit() -> None:
    """Over a border of pages, for every length of the prompt around it."""
    model, local, whole = weights("qwen3"), LocalFfn(weights("qwen3")), text(PAGE + 20)
    want = windowed(50).prefill(model, local, whole)
    for n in (1, 49, 50, 51, PAGE, PAGE + 19):
        engine = windowed(50)
        engine.prefill(model, local, whole[:n])
        for token in whole[n:]:
            last = engine.decode_step(model, local, token)
        np.testing.assert_array_equal(last, want)


def test_what_is_kept_of_a_closed_window() -> None:
    model, n_layer = weights("llama"), weights("llama").architecture.n_layer
    engine = play("windowed-checkpoint:window=10", model, text(30), 4).engine
    assert isinstance(engine, WindowedCheckpointEngine)
    row = 2 * 2 * 32 * 4 * n_layer
    memory = engine.memory()
    assert (engine.n_closed, engine.window_tokens) == (3, 11)
    # Position 33 saw 30..33 and 29. Held: those, and the checkpoints 9 and 19.
    assert (memory.reachable_tokens, memory.rows) == (5, 7)
    assert {kind.kind: (kind.occupied, kind.cold) for kind in memory.kinds} == {
        "kv": (5 * row, False),
        "checkpoints": (3 * row, True),
        "tokens": (4 * 4, False),
        "archived tokens": (4 * 30, True),
    }
    assert [p for p in range(34) if engine.read_kv_row(1, p) is not None] == [9, 19, 29, 30, 31, 32, 33]
    assert engine.read_kv_row(1, -1) is None
    assert engine.stage_summary() == {"rows_computed": 34, "windows_closed": 3}
    assert windowed(10).memory().rows == windowed(10).n_closed == 0


def test_reach_at_a_close() -> None:
    """The token that fills a window has seen all of it, and the row in front."""
    model = weights("llama")
    reach = [
        play("windowed-checkpoint:window=5", model, text(n), 0).engine.memory().reachable_tokens for n in range(1, 13)
    ]
    assert reach == [1, 2, 3, 4, 5, 2, 3, 4, 5, 6, 2, 3]


def test_a_replay_gives_back_the_rows_of_the_window() -> None:
    """From the checkpoint before it: the rows that the session had, to the bit, and the session is not touched."""
    model, local, prompt = weights("qwen2"), LocalFfn(weights("qwen2")), text(43)
    engine = windowed(12)
    engine.mask = StateMask.FULL
    engine.prefill(model, local, prompt)
    state = engine.last_state
    assert state is not None
    assert state.keys is not None
    assert state.values is not None
    assert state.positions.tolist() == list(range(43))
    undisturbed = play("windowed-checkpoint:window=12", model, [*prompt, 7], 0).hidden[0]
    for window in (2, 0, 1):
        again = engine.replay(model, local, window)
        span = slice(12 * window, 12 * window + 12)
        assert (again.start, again.stop, again.tokens.tolist()) == (span.start, span.stop, prompt[span])
        np.testing.assert_array_equal(
            again.hidden[-1:], play("windowed-checkpoint:window=12", model, prompt[: span.stop], 0).hidden
        )
        for layer in range(model.architecture.n_layer):
            _, keys, values = again.rows.layers[layer].rows(span.start, span.stop)
            np.testing.assert_array_equal(keys, state.keys[layer, span])
            np.testing.assert_array_equal(values, state.values[layer, span])
    assert engine.stage_summary()["rows_replayed"] == 36
    np.testing.assert_array_equal(engine.decode_step(model, local, 7)[0], undisturbed)


def test_a_replay_begins_at_the_checkpoint_before() -> None:
    """Another checkpoint gives other rows, and the replay says that they do not end where they ended."""
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = windowed(12)
    engine.prefill(model, local, text(40))
    assert engine._state is not None
    engine._state.checkpoints[0].values[1] += 1
    with pytest.raises(InvariantViolation, match="replay of window 0 does not end in its checkpoint, layer 1"):
        engine.replay(model, local, 0)
    engine._state.checkpoints[0].values[0] += 1
    with pytest.raises(InvariantViolation, match="replay of window 1 does not end in its checkpoint, layer 1"):
        engine.replay(model, local, 1)
    engine.replay(model, local, 2)


def test_what_cannot_be_replayed() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = windowed(12)
    with pytest.raises(EmptyPrompt):
        engine.replay(model, local, 0)
    engine.prefill(model, local, text(20))
    for window in (-1, 1):
        with pytest.raises(IndexError, match="of 1 closed ones"):
            engine.replay(model, local, window)
    with pytest.raises(ExecutionRefused, match="other weights"):
        engine.replay(weights("qwen3"), local, 0)
    with pytest.raises(BackendFailure):
        engine.replay(model, FailingFfn(model, 1), 0)
    engine.replay(model, local, 0)
    assert engine.stage_summary()["rows_replayed"] == 12


@pytest.mark.parametrize("failing", [1, 2])
def test_a_close_that_stops_halfway_is_a_lost_state(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    """Rows that have left a layer do not come back: rewinding needs room in every layer, and there is none any more."""
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = windowed(12)
    engine.prefill(model, local, text(11))
    monkeypatch.setattr(PageStore, "drop_below", _failing_call(failing))
    with pytest.raises(MemoryError if failing == 1 else StateInvalidated):
        engine.decode_step(model, local, 5)
    monkeypatch.undo()
    if failing == 1:
        want = play("windowed-checkpoint:window=12", model, [*text(11), 5], 0).hidden
        np.testing.assert_array_equal(engine.decode_step(model, local, 5), want)
    else:
        with pytest.raises(StateInvalidated, match="prefill the session again"):
            engine.decode_step(model, local, 5)


def _failing_call(n: int) -> object:
    calls, real = iter(range(1, 1000)), PageStore.drop_below

    def drop_below(store: PageStore, start: int) -> None:
        if next(calls) == n:
            raise MemoryError("as planned")
        real(store, start)

    return drop_below
