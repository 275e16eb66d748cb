"""Deferred prefill on real engines and the reference: the eager session's tokens and rows, in fewer calls."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtape.backends.isolated.engine import open_isolated
from kvtape.backends.protocol import Backend, Engine
from kvtape.planner.events import Op
from support.deferring import Pair, Sessions, calls, opened
from support.engines import ENGINES, f32_config, load_engine
from support.tiny_gguf import write_tiny

pytestmark = pytest.mark.contract("I6")

_folder = tempfile.TemporaryDirectory(prefix="kvtape-deferred-")
CHUNK = 16
FLOOR = {"llama": 2e-5, "openvino": 2e-5, "reference": 2e-5}
"""Largest difference of logits (which are of size 1 to 10) that comes from other shapes of the same products, f32."""


@functools.cache
def model() -> Path:
    return write_tiny(Path(_folder.name) / "llama.gguf", "llama")


@functools.cache
def engine(name: str) -> Engine:
    return load_engine(name, model())


def backend(name: str) -> Backend:
    return engine(name).open(f32_config(n_ctx=64, chunk=CHUNK))


@pytest.mark.parametrize("name", ENGINES)
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    policy=st.sampled_from(
        ["none", "stream:sink=2,recent=20,block=4", "class:budget=40,block=4", "stream:sink=2,recent=9,hole=refill"]
    ),
    script=calls(max_size=8),
)
def test_the_same_as_an_eager_session_up_to_the_chunking_floor(
    name: str, policy: str, script: list[tuple[str, int, int]]
) -> None:
    """Tape, layout, cold blocks, blocks, plans and generated tokens; logits within the floor; rows that are equal."""
    eager, lazy = opened(lambda: backend(name), policy)
    pair = Pair(eager, lazy, 259, tolerance=FLOOR[name])
    try:
        pair.play([call for call in script if call[0] != "score"])
        if not pair.over:
            one, other = (s.backend.witness() for s in (eager, lazy))
            assert one.cache_positions.tolist() == other.cache_positions.tolist()
            for a, b in zip((*one.rows.keys, *one.rows.values), (*other.rows.keys, *other.rows.values), strict=True):
                assert np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max(initial=0) <= FLOOR[name]
    finally:
        eager.session.close()
        lazy.session.close()


def talk(one: Sessions) -> list[int]:
    """Turns of a prefix in pieces of a whole chunk each, so that deferring computes the very same ones."""
    rng = np.random.default_rng(5)
    said: list[int] = []
    for n in (2, 1):
        tape = one.session.tape
        tape = tape[: len(tape) // CHUNK * CHUNK]
        one.session.ensure_prefix([*tape, *rng.integers(3, 259, n * CHUNK).tolist()])
        one.session.prefill_suffix(rng.integers(3, 259, 7).tolist())
        said += one.session.decode(4, stop_tokens=frozenset()).tokens
    return said


@pytest.mark.parametrize("name", ENGINES)
def test_pieces_that_come_out_equal_are_equal_to_the_bit(name: str) -> None:
    eager, lazy = opened(lambda: backend(name), "none")
    assert talk(eager) == talk(lazy)
    one, other = eager.session.logits, lazy.session.logits
    assert one is not None
    assert other is not None
    assert one.tobytes() == other.tobytes()
    pieces = [[e.n_tokens for e in s.sink.events if e.op is Op.PREFILL] for s in (eager, lazy)]
    assert pieces[0] == pieces[1]
    eager.session.close()
    lazy.session.close()


def test_the_rows_of_a_deferring_session_in_a_host_process() -> None:
    isolated = open_isolated("reference", model(), {})
    try:
        lazy = Sessions(isolated.open(f32_config(n_ctx=64, chunk=CHUNK)), "none", defer=True)
        here = Sessions(backend("reference"), "none", defer=True)
        assert talk(lazy) == talk(here)
        assert [e.op for e in lazy.sink.events] == [e.op for e in here.sink.events]
        lazy.session.close()
        here.session.close()
    finally:
        isolated.close()
