"""`boundary-kv`: `standard` to the bit, frames of every chunk, and sessions that go on from them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import InputRejected, StateRejected
from kvtape.backends.reference.engines.boundary_frame import BoundaryFrame
from kvtape.backends.reference.engines.boundary_kv import BoundaryKvEngine
from kvtape.backends.reference.errors import BackendFailure, EmptyPrompt, StateInvalidated
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.pages import PAGE
from support.reference import SHAPES, FailingFfn, kv_engine, play, text, weights


def boundary(chunk: int = 16) -> BoundaryKvEngine:
    engine = kv_engine(f"boundary-kv:chunk={chunk}")
    assert isinstance(engine, BoundaryKvEngine)
    return engine


def frames_of(n: int, chunk: int = 16, shape: str = "llama") -> tuple[BoundaryFrame, ...]:
    engine, model = boundary(chunk), weights(shape)
    engine.prefill(model, LocalFfn(model), text(n))
    return engine.take_frames()


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_it_is_standard_to_the_bit_and_resumes_to_the_bit(shape: str) -> None:
    """From frames alone, and from frames and the tokens behind the last."""
    model, local, prompt = weights(shape), LocalFfn(weights(shape)), text(PAGE - 4)
    standard = play("standard", model, prompt, 8)
    engine = boundary(50)
    hidden = [engine.prefill(model, local, prompt), *[engine.decode_step(model, local, t) for t in standard.tokens]]
    np.testing.assert_array_equal(np.concatenate(hidden), standard.hidden)
    frames = engine.take_frames()
    assert [(frame.index, frame.start, frame.stop) for frame in frames] == [(i, 50 * i, 50 * i + 50) for i in range(5)]
    other = boundary(50)
    np.testing.assert_array_equal(other.resume(model, local, frames, prompt[250:]), standard.hidden[:1])
    for i, token in enumerate(standard.tokens):
        np.testing.assert_array_equal(other.decode_step(model, local, token)[0], standard.hidden[i + 1])
    for layer in range(model.architecture.n_layer):
        for position in (0, 49, 250, PAGE + 3):
            mine, theirs = other.read_kv_row(layer, position), standard.engine.read_kv_row(layer, position)
            assert mine is not None
            assert theirs is not None
            np.testing.assert_array_equal(mine[0], theirs[0])
            np.testing.assert_array_equal(mine[1], theirs[1])
    assert other.stage_summary() == {"rows_computed": 10, "rows_resumed": 250, "frames_made": 0}


def test_a_resumed_session_makes_the_frames_that_the_other_would_have_made() -> None:
    model, local, whole = weights("llama"), LocalFfn(weights("llama")), text(70)
    want = frames_of(70)
    engine = boundary()
    engine.resume(model, local, want[:2], whole[32:50])
    for token in whole[50:]:
        engine.decode_step(model, local, token)
    assert [frame.digest for frame in engine.take_frames()] == [frame.digest for frame in want[2:]]
    assert engine.take_frames() == ()


def test_frames_alone_give_the_last_row() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    hidden = boundary().resume(model, local, frames_of(40))
    np.testing.assert_array_equal(hidden, boundary().prefill(model, local, text(32)))


def test_another_process_goes_on_where_this_one_was() -> None:
    """Frames as bytes, in a process that shares nothing but the model's file."""
    model, whole = weights("qwen3"), text(40)
    want = play("standard", model, whole, 3)
    script = (
        "import sys, pathlib\n"
        "from kvtape.backends.reference.engines.boundary_frame import BoundaryFrame\n"
        "from kvtape.backends.reference.engines.registry import make_engine, parse_engine\n"
        "from kvtape.backends.reference.model.ffn import LocalFfn\n"
        "from kvtape.backends.reference.model.weights import Weights\n"
        "model = Weights(sys.argv[1]); local = LocalFfn(model); given = sys.stdin.buffer.read(); frames = []\n"
        "while given:\n"
        "    n = int.from_bytes(given[:8], 'little'); frames.append(BoundaryFrame.from_bytes(given[8:8 + n]))\n"
        "    given = given[8 + n:]\n"
        "engine = make_engine(parse_engine('boundary-kv:chunk=16'))\n"
        "tokens = [int(t) for t in sys.argv[2].split(',')]\n"
        "engine.resume(model, local, frames, tokens[:-1])\n"
        "sys.stdout.buffer.write(engine.decode_step(model, local, tokens[-1]).tobytes())\n"
    )
    blobs = [frame.to_bytes() for frame in frames_of(40, shape="qwen3")]
    given = b"".join(len(blob).to_bytes(8, "little") + blob for blob in blobs)
    tokens = ",".join(str(t) for t in [*whole[32:], *want.tokens])
    done = subprocess.run(
        [sys.executable, "-c", script, model.path, tokens], input=given, capture_output=True, check=True
    )
    assert done.stdout == want.hidden[-1].tobytes()


def test_memory_of_frames_is_that_of_those_nobody_took() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = boundary()
    engine.prefill(model, local, text(40))
    row = 2 * 2 * 32 * 4 * model.architecture.n_layer
    kinds = {kind.kind: (kind.occupied, kind.cold) for kind in engine.memory().kinds}
    assert kinds == {
        "kv": (40 * row, False),
        "tokens": (8 * 4, False),
        "frames": (2 * (16 * row + 16 * 4 + 64 * 4), True),
    }
    assert engine.memory().cold_bytes == sum(frame.nbytes for frame in engine.take_frames())
    assert engine.memory().cold_bytes == 0
    engine.decode_step(model, local, 5)
    engine.prefill(model, local, text(20))
    assert [frame.start for frame in engine.take_frames()] == [0]
    assert boundary().memory().occupied_bytes == 0


def _wrong(frames: tuple[BoundaryFrame, ...]) -> dict[str, tuple[BoundaryFrame, ...]]:
    first, second, third = frames
    other = frames_of(48, shape="qwen3")
    short = replace(third, tokens=third.tokens[:-1])
    return {
        "no frames": (),
        "missing": (first, third),
        "repeated": (first, first, second),
        "swapped": (second, first, third),
        "another session": (first, replace(second, previous="00" * 16)),
        "another model": other,
        "float64": tuple(
            replace(f, keys=f.keys.astype(np.float64), values=f.values.astype(np.float64)) for f in frames
        ),
        "changed": (replace(first, tokens=first.tokens[::-1].copy()), second),
        "short": (first, second, short),
        "another chunk": frames_of(48, chunk=24),
    }


@pytest.mark.parametrize("what", sorted(_wrong(frames_of(48))))
def test_frames_that_are_no_session_are_refused_and_nothing_changes(what: str) -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = boundary()
    engine.prefill(model, local, text(20))
    with pytest.raises(StateRejected):
        engine.resume(model, local, _wrong(frames_of(48))[what])
    np.testing.assert_array_equal(
        engine.decode_step(model, local, 5), play("standard", model, [*text(20), 5], 0).hidden
    )


def test_a_resume_that_fails_leaves_the_session_as_it_was() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine, fresh = boundary(), boundary()
    engine.prefill(model, local, text(20))
    before = dict(engine.stage_summary())
    for which in (engine, fresh):
        with pytest.raises(BackendFailure):
            which.resume(model, FailingFfn(model, 1), frames_of(48), [5])
        with pytest.raises(InputRejected):
            which.resume(model, local, frames_of(48), [model.n_vocab])
    with pytest.raises(EmptyPrompt):
        fresh.decode_step(model, local, 5)
    assert engine.stage_summary() == before
    np.testing.assert_array_equal(
        engine.decode_step(model, local, 5), play("standard", model, [*text(20), 5], 0).hidden
    )


def test_a_resumed_session_can_be_rewound() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = boundary()
    engine.resume(model, local, frames_of(48))
    with pytest.raises(BackendFailure):
        engine.decode_step(model, FailingFfn(model, 1), 5)
    np.testing.assert_array_equal(
        engine.decode_step(model, local, 5), play("standard", model, [*text(48), 5], 0).hidden
    )


def test_a_chunk_that_is_not_in_every_layer_makes_no_frame() -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine = boundary()
    engine.prefill(model, local, text(15))
    assert engine._rows is not None
    engine._rows.layers[1].remove(3, 4)
    with pytest.raises(StateInvalidated):
        engine.decode_step(model, local, 5)
    assert engine.take_frames() == ()


@given(st.data())
def test_a_damaged_frame_is_noticed(data: st.DataObject) -> None:
    blob = bytearray(frames_of(16)[0].to_bytes())
    frame = BoundaryFrame.from_bytes(bytes(blob))
    assert frame.digest == frames_of(16)[0].digest
    at, bit = data.draw(st.integers(0, len(blob) - 1)), data.draw(st.integers(0, 7))
    blob[at] ^= 1 << bit
    with pytest.raises(StateRejected):
        BoundaryFrame.from_bytes(bytes(blob))
    with pytest.raises(StateRejected):
        BoundaryFrame.from_bytes(bytes(blob[: data.draw(st.integers(0, len(blob) - 1))]))


@pytest.mark.parametrize("part", ["tokens", "hidden", "keys", "values", "start", "model", "previous", "index"])
def test_the_digest_covers_every_part(part: str) -> None:
    frame = frames_of(16)[0]
    value = getattr(frame, part)
    other = value + ("x" if isinstance(value, str) else 1)
    assert replace(frame, **{part: other}).digest != frame.digest
