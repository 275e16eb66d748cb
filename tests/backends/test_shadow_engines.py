"""The shadow pass on real engines: what it measures is the attention of a dense model, and the session is untouched."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock, StoppableClock
from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.shadow import open_shadow
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.sim.quality.attention import AttentionMap
from kvtape.testing.sink import ListSink
from support.attention import ScoredOracle
from support.attention_maps import map_of, without_dense
from support.engines import ENGINES, load_engine
from support.oracle import Array, OracleModel
from support.tiny_gguf import write_tiny

_folder = tempfile.TemporaryDirectory(prefix="kvtape-shadow-")
N_HEADS = 2
TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, 259, 220)]
POLICIES = ("class:budget=96,block=16", "h2o:budget=64,recent=16,block=16")
ATOL = 2e-5
"""Of a piece's mass on one token, which is at most 32; f32 against the oracle's float64."""


@functools.cache
def model_file() -> Path:
    return write_tiny(Path(_folder.name) / "tiny.gguf")


@functools.cache
def engine(name: str) -> Engine:
    return load_engine(name, model_file())


class Still:
    def now_ns(self) -> int:
        return 0


@functools.cache
def recorded(name: str, policy: str, *, shadow: bool) -> ListSink:
    """A session whose tape grows past its context, is cut in the middle of a piece, and grows again."""
    scores = {"scores": "on"} if policy.startswith("h2o") else {}
    config = SessionConfig(n_ctx=96, chunk=32, kv_type_k="f32", kv_type_v="f32", options=scores)
    clock, sink = StoppableClock(Still()), ListSink()
    beside = open_shadow(engine(name), config, clock, tokens=256) if shadow else None
    kv = engine(name).open(config)
    with Session(kv, parse_policy(policy), sink, clock, run_id="r", session_id="s", shadow=beside) as session:
        session.ensure_prefix(TOKENS[:150])
        session.decode(12, stop_tokens=frozenset())
        session.ensure_prefix([*TOKENS[:140], *TOKENS[200:220]])
        session.prefill_suffix(TOKENS[150:190])
    assert beside is None or beside.given_up is None
    return sink


TAPE = [*TOKENS[:140], *TOKENS[200:220], *TOKENS[150:190]]
"""At the end of it; what a policy keeps does not change it."""


@functools.cache
def attended(pieces: tuple[tuple[int, int], ...]) -> list[Array]:
    """What the oracle's queries of each piece pay to the tape before and with them, `[layers, heads, rows]`."""
    oracle = ScoredOracle(OracleModel(model_file()))
    found = []
    for start, stop in pieces:
        oracle.prefill(TAPE[start:stop], start)
        found.append(oracle.take().by_head)
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ENGINES)
def test_the_session_records_the_same_with_and_without_it(name: str, policy: str) -> None:
    beside = recorded(name, policy, shadow=True)
    alone = recorded(name, policy, shadow=False)
    assert without_dense(beside) == alone
    assert any(e.op == "evict" for e in alone.events)


@pytest.mark.parametrize("name", ENGINES)
def test_every_piece_is_what_the_oracle_attends_to(name: str) -> None:
    found = map_of(recorded(name, POLICIES[0], shadow=True))
    path = found.path(2, 200)
    assert path.complete
    assert found.layers == tuple(range(len(found.layers)))
    oracle = attended(tuple((p.start, p.stop) for p in path.pieces))
    for piece, wanted in zip(path.pieces, oracle, strict=True):
        longest = (piece.stops - piece.starts).max()
        for got, rows in ((piece.mass, wanted.sum(axis=1)), (piece.peak, wanted.max(axis=1))):
            np.testing.assert_allclose(got, np.add.reduceat(rows, piece.starts, axis=1), rtol=0, atol=ATOL * longest)
        np.testing.assert_allclose(piece.mass.sum(axis=1), N_HEADS * piece.n_queries, rtol=1e-5)


def test_both_engines_measure_the_same() -> None:
    maps: Sequence[AttentionMap] = [map_of(recorded(name, POLICIES[0], shadow=True)) for name in ENGINES]
    for one, other in zip(maps[0].path(2, 200).pieces, maps[1].path(2, 200).pieces, strict=True):
        assert (one.start, one.stop, one.repeated) == (other.start, other.stop, other.repeated)
        np.testing.assert_array_equal(one.stops, other.stops)
        np.testing.assert_allclose(one.mass, other.mass, atol=1e-3)
        np.testing.assert_allclose(one.peak, other.peak, atol=1e-3)


@pytest.mark.parametrize("name", ENGINES)
def test_blocks_that_the_session_evicted_have_their_attention(name: str) -> None:
    sink = recorded(name, POLICIES[0], shadow=True)
    last = map_of(sink).pieces[-1]
    resident = fold(sink.events).resident
    evicted = np.array([start not in resident for start in last.starts.tolist()])
    assert 0 < evicted.sum() < len(evicted)
    assert (last.mass[:, evicted] > 0).all()


def test_one_query_at_a_time_adds_up_to_the_same() -> None:
    maps = []
    for every in (1, 32):
        clock, sink = StoppableClock(ManualClock()), ListSink()
        config = SessionConfig(n_ctx=96, chunk=32, kv_type_k="f32", kv_type_v="f32")
        shadow = open_shadow(engine("llama"), config, clock, tokens=64, every=every)
        kv = engine("llama").open(config)
        with Session(kv, parse_policy("none"), sink, clock, run_id="r", session_id="s", shadow=shadow) as session:
            session.ensure_prefix(TOKENS[:64])
        maps.append(map_of(sink).path(1, 64))
    fine, coarse = maps
    assert len(fine.pieces) == 64
    assert fine.window(5).n_queries == 5
    got, want = fine.accumulated(), coarse.accumulated()
    np.testing.assert_array_equal(got.starts, want.starts)
    np.testing.assert_allclose(got.mass, want.mass, rtol=1e-5)


@pytest.mark.parametrize(("arch", "why"), [("mamba", "recurrent"), ("gemma3", "windowed rows")])
def test_a_model_without_attention_to_every_token_is_refused(arch: str, why: str, tmp_path: Path) -> None:
    loaded = load_engine("llama", write_tiny(tmp_path / "other.gguf", arch))
    try:
        with pytest.raises(UnsupportedOperation, match=f"dense attention.*{why}.*leave out --score-all"):
            open_shadow(loaded, SessionConfig(n_ctx=64), StoppableClock(ManualClock()), tokens=64)
    finally:
        loaded.close()


def test_openvino_gets_its_mirror_back_for_the_shadow() -> None:
    config = SessionConfig(n_ctx=64, options={"mirror": "off"})
    shadow = open_shadow(engine("openvino"), config, StoppableClock(ManualClock()), tokens=64)
    shadow.close()
