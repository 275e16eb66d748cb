"""Field cases on both real engines: odd contexts (F37), and nothing of one session in the next (F48)."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.asked import effective_n_ctx
from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import ContextOverflow
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.events import Event, Op
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from support.engines import ENGINES, load_engine
from support.tiny_gguf import write_tiny

_folder = tempfile.TemporaryDirectory(prefix="kvtape-field-")


@functools.cache
def model() -> Path:
    return write_tiny(Path(_folder.name) / "llama.gguf", "llama", n_ctx=8192)


@functools.cache
def shared_engine(name: str) -> Engine:
    return load_engine(name, model())


def config(n_ctx: int = 256, **more: object) -> SessionConfig:
    return SessionConfig(n_ctx=n_ctx, chunk=64, kv_type_k="f32", kv_type_v="f32", **more)  # type: ignore[arg-type]


# -- F37: odd contexts are rounded up to 256 -------------------------------------------------------------------------

ROUNDED = {1: 256, 255: 256, 257: 512, 5000: 5120}


def test_f37_the_rule() -> None:
    assert {asked: effective_n_ctx(asked) for asked in ROUNDED} == ROUNDED


@pytest.mark.parametrize("asked", sorted(ROUNDED))
@pytest.mark.parametrize("name", ENGINES)
def test_f37_both_numbers_are_on_record_and_the_effective_one_is_what_overflows(name: str, asked: int) -> None:
    """The case says that overflow goes by the asked value. Here one log has one meaning on every engine: it goes by
    the effective one, which stands beside the asked one in the session's row."""
    sink = ListSink()
    backend = shared_engine(name).open(config(asked))
    with Session(backend, parse_policy("none"), sink, ManualClock(), run_id="r", session_id="s") as session:
        (row,) = sink.sessions
        assert (row.n_ctx_asked, row.n_ctx, backend.n_ctx) == (asked, ROUNDED[asked], ROUNDED[asked])
        assert sink.events[0].n_tokens == ROUNDED[asked]
        with pytest.raises(
            ContextOverflow, match=f"{ROUNDED[asked] + 1} tokens do not fit a context of {ROUNDED[asked]}"
        ):
            session.ensure_prefix([5] * (ROUNDED[asked] + 1))
        if asked == 257:
            session.ensure_prefix([5] * ROUNDED[asked])
            assert session.resident.n_tokens == ROUNDED[asked]


def test_f37_bytes_use_the_rounded_value() -> None:
    """llama.cpp allocates for the effective context and one more unit of padding, which surgery needs."""
    sizes = {asked: shared_engine("llama").open(config(asked)) for asked in (1, 255, 257)}
    allocated = {asked: backend.kv_bytes()["allocated"] for asked, backend in sizes.items()}
    for backend in sizes.values():
        backend.close()
    assert allocated[1] == allocated[255]
    assert allocated[257] * 2 == allocated[255] * 3


# -- F48: state of one session in the next ---------------------------------------------------------------------------

POLICIES = ("stream:sink=4,recent=40", "h2o:budget=96,recent=16,block=8", "snapkv:budget=96,window=16,block=8")


def play(engine: Engine, policy: str, seed: int) -> tuple[list[Event], bytes]:
    """Events without times, and the last logits, of one session that evicts."""
    sink = ListSink()
    backend = engine.open(config(cold_budget_tokens=64, options={"scores": "on"}))
    draw = np.random.default_rng(seed).integers(3, 259, 420).tolist()
    with Session(backend, parse_policy(policy), sink, ManualClock(), run_id="r", session_id=f"s{seed}") as session:
        session.ensure_prefix(draw[:300])
        said = iter(draw[300:])
        session.decode(40, choose=lambda _: next(said), stop_tokens=frozenset())
        session.ensure_prefix([*session.tape[:310], *draw[350:]])
        logits = session.logits
        assert logits is not None
        numbers = logits.tobytes()
    assert any(e.op is Op.EVICT for e in sink.events)
    return sink.events, numbers


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ENGINES)
def test_f48_two_sessions_in_a_row_are_two_separate_runs(name: str, policy: str) -> None:
    engine = shared_engine(name)
    in_a_row = [play(engine, policy, seed) for seed in (1, 2)]
    for seed, seen in zip((1, 2), in_a_row, strict=True):
        alone = load_engine(name, model())
        try:
            assert play(alone, policy, seed) == seen
        finally:
            alone.close()
