"""A step that fails, in every engine, every layer, every place of a layer: the identical token may be tried again."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from kvtape.backends.reference.engines.engine import StateMask
from kvtape.backends.reference.engines.registry import engine_entries
from kvtape.backends.reference.engines.row_codecs import RowCodec
from kvtape.backends.reference.engines.session_engine import SessionEngine
from kvtape.backends.reference.errors import BackendFailure, EmptyPrompt, StateInvalidated
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.pages import PageStore
from support.reference import FailingFfn, Play, kv_engine, play, text, weights
from support.reference_faults import STAGES, Planted, plant

SPECS = {
    "boundary-kv": ["boundary-kv:chunk=12"],
    "boundary-per-layer": ["boundary-per-layer:window=12,codecs=bf16x1+q8_0"],
    "markov-rs": ["markov-rs", "markov-rs:window=12"],
    "markov-rs-codec": ["markov-rs-codec:window=12"],
    "no-cache": ["no-cache"],
    "standard": ["standard", "standard:window=12", "standard:window=12,window_rule=legacy"],
    "turbo-quant": ["tq4", "tq3"],
    "windowed-checkpoint": ["windowed-checkpoint:window=12"],
}
ALL = [spec for specs in SPECS.values() for spec in specs]
RETRIEVAL = {"apollo"}


def test_every_engine_is_here() -> None:
    assert {entry.name for entry in engine_entries()} - RETRIEVAL == set(SPECS)


@functools.cache
def undisturbed(spec: str, n: int) -> Play:
    return play(spec, weights("llama"), text(n), 4)


def books(engine: Any) -> Any:
    """All that an engine says of itself."""
    return engine.memory(), dict(engine.stage_summary()), engine.handle()


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("n", [11, 23])
def test_the_token_may_be_tried_again(monkeypatch: pytest.MonkeyPatch, spec: str, stage: str, n: int) -> None:
    """Around the moment at which a window is full or a chunk is whole: the bits of a step that never failed."""
    model, local = weights("llama"), LocalFfn(weights("llama"))
    want, engine = undisturbed(spec, n), kv_engine(spec)
    engine.prefill(model, local, text(n))
    for i, token in enumerate(want.tokens[:2]):
        before = books(engine)
        for layer in range(model.architecture.n_layer):
            with monkeypatch.context() as patch:
                plant(patch, stage, layer)
                with pytest.raises(Planted):
                    engine.decode_step(model, local, token)
            _same_books(books(engine), before)
        np.testing.assert_array_equal(engine.decode_step(model, local, token)[0], want.hidden[i + 1])
    _same_rows(engine, want, n + 2)


def _same_books(now: Any, before: Any) -> None:
    """Capacity may have grown in a failed step, and stays."""
    assert now[1:] == before[1:]
    assert (now[0].reachable_tokens, now[0].rows) == (before[0].reachable_tokens, before[0].rows)
    assert [(k.kind, k.occupied) for k in now[0].kinds] == [(k.kind, k.occupied) for k in before[0].kinds]


def _same_rows(engine: Any, want: Play, n: int) -> None:
    """Those that a session without faults holds after as many tokens."""
    model = weights("llama")
    other = kv_engine(engine.info.spec)
    other.prefill(model, LocalFfn(model), text(n - 2))
    for token in want.tokens[:2]:
        other.decode_step(model, LocalFfn(model), token)
    for layer in range(model.architecture.n_layer):
        for position in range(n + 1):
            mine, theirs = engine.read_kv_row(layer, position), other.read_kv_row(layer, position)
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                np.testing.assert_array_equal(mine[0], theirs[0])
                np.testing.assert_array_equal(mine[1], theirs[1])


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("layer", range(2))
def test_a_router_that_fails_again_and_again(spec: str, layer: int) -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    want, engine = undisturbed(spec, 11), kv_engine(spec)
    engine.prefill(model, local, text(11))
    failing = FailingFfn(model, layer, times=3)
    for _ in range(3):
        with pytest.raises(BackendFailure, match=f"layer {layer}"):
            engine.decode_step(model, failing, want.tokens[0])
    for i, token in enumerate(want.tokens):
        np.testing.assert_array_equal(engine.decode_step(model, failing, token)[0], want.hidden[i + 1])


@pytest.mark.parametrize("spec", ALL)
@pytest.mark.parametrize("stage", STAGES)
def test_a_prefill_that_fails_leaves_the_session_as_it_was(
    monkeypatch: pytest.MonkeyPatch, spec: str, stage: str
) -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    want, engine, fresh = undisturbed(spec, 11), kv_engine(spec), kv_engine(spec)
    engine.prefill(model, local, text(11))
    before = books(engine)
    for layer in range(model.architecture.n_layer):
        for which in (engine, fresh):
            with monkeypatch.context() as patch:
                plant(patch, stage, layer)
                with pytest.raises(Planted):
                    which.prefill(model, local, text(30, seed=9))
    assert books(engine) == before
    np.testing.assert_array_equal(engine.decode_step(model, local, want.tokens[0])[0], want.hidden[1])
    with pytest.raises(EmptyPrompt):
        fresh.decode_step(model, local, 5)


def _second_call(real: Any) -> Any:
    calls = iter(range(1, 1000))

    def method(self: Any, *args: Any) -> Any:
        if next(calls) == 2:
            raise Planted("in the second layer")
        return real(self, *args)

    return method


@pytest.mark.parametrize(
    ("spec", "owner", "name", "lost"),
    [
        ("standard:window=12", PageStore, "drop_below", True),
        ("windowed-checkpoint:window=12", PageStore, "drop_below", True),
        ("markov-rs:window=12", PageStore, "drop_below", True),
        ("markov-rs-codec:window=12", RowCodec, "encode", False),
        ("boundary-per-layer:window=12,codecs=q8_0", RowCodec, "encode", False),
    ],
)
def test_rows_can_be_put_back_until_they_have_left_a_layer(
    monkeypatch: pytest.MonkeyPatch, spec: str, owner: Any, name: str, *, lost: bool
) -> None:
    """A window that slid in the first layer only is a lost state, and is said to be; before that, try again."""
    model, local = weights("llama"), LocalFfn(weights("llama"))
    # The next step is the first that lets rows go: one that closes a window, or one more than the window holds.
    n = 11 if spec.startswith("windowed") else 12
    want, engine = undisturbed(spec, n), kv_engine(spec)
    assert isinstance(engine, SessionEngine)
    engine.prefill(model, local, text(n))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, _second_call(getattr(owner, name)))
        with pytest.raises(StateInvalidated if lost else Planted):
            engine.decode_step(model, local, want.tokens[0])
    if lost:
        for call in (engine.snapshot, lambda: engine.decode_step(model, local, want.tokens[0])):
            with pytest.raises(StateInvalidated, match="prefill the session again"):
                call()
        engine.prefill(model, local, text(n))
    np.testing.assert_array_equal(engine.decode_step(model, local, want.tokens[0])[0], want.hidden[1])


@pytest.mark.parametrize("spec", ALL)
def test_a_failed_step_dumps_nothing(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    """The last state is that of the last call that was whole."""
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = kv_engine(spec)
    assert isinstance(engine, SessionEngine)
    engine.mask = StateMask.H_ONLY
    engine.prefill(model, local, text(30))
    state = engine.last_state
    assert state is not None
    assert state.h.shape[:2] == (2, 30)
    plant(monkeypatch, "ffn", 1)
    with pytest.raises(Planted):
        engine.decode_step(model, local, 5)
    assert engine.last_state is state
    engine.decode_step(model, local, 5)
    assert engine.last_state is not state
