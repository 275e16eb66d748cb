"""Sessions on the reference: what the conformance suite cannot ask of a backend that it does not know."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import Cancelled, EngineFault, InputRejected, StateRejected, UsageError
from kvtape.backends.protocol import Backend, SessionConfig, Witness
from kvtape.backends.reference.model.forward import logits_at
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.session.engine import ReferenceEngine
from kvtape.backends.session import Session
from kvtape.planner.events import Op, Way
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from support.tiny_gguf import write_tiny

TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, 259, 90)]
CONFIG = SessionConfig(n_ctx=256, chunk=16, cold_budget_tokens=256)
KEEPING = ("no-cache", "markov-rs", "markov-rs-codec", "boundary-kv", "boundary-per-layer", "turbo-quant:bits=3")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny.gguf", n_embd=128, n_head=4, n_head_kv=2)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[ReferenceEngine]:
    engine = ReferenceEngine.load(path)
    yield engine
    engine.close()


def opened(model: ReferenceEngine, **options: str) -> Backend:
    return model.open(replace(CONFIG, options=options))


def decoded(backend: Backend, tokens: list[int], start: int) -> np.ndarray:
    told = iter(tokens)
    return backend.decode_until(len(tokens), 256, start, np.empty(0, np.float32), lambda _: next(told)).logits


def image(seen: Witness) -> list[bytes]:
    return [rows.tobytes() for rows in (seen.cache_positions, *seen.rows.keys, *seen.rows.values)]


def test_a_session_computes_the_bits_of_the_plain_forward(engine: ReferenceEngine, path: Path) -> None:
    backend = opened(engine)
    backend.prefill(TOKENS[:50], 0)
    logits = decoded(backend, TOKENS[50:60], 50)
    np.testing.assert_array_equal(logits, logits_at(Weights(path), TOKENS[:60], [59])[0])


def test_rows_that_left_and_came_back_are_the_same_to_the_bit(engine: ReferenceEngine) -> None:
    backend, whole = opened(engine), opened(engine)
    for b in (backend, whole):
        b.prefill(TOKENS[:60], 0)
    block = backend.export_block(10, 30)
    backend.evict(10, 30)
    backend.shift(30, 60, -20)
    backend.shift(10, 40, 20)
    backend.admit(block, 10, 10)
    mine, theirs = backend.witness(), whole.witness()
    assert image(Witness(mine.cache_positions, "engine", mine.rows))[0] == image(theirs)[0]
    for a, b in zip((*mine.rows.keys, *mine.rows.values), (*theirs.rows.keys, *theirs.rows.values), strict=True):
        np.testing.assert_array_equal(a[:30], b[:30])
        np.testing.assert_allclose(a[30:], b[30:], rtol=0, atol=1e-6)  # turned there and back: two roundings


@pytest.mark.parametrize("model", [{"yarn": 4}, {"arch": "gemma3"}], ids=["yarn", "two bases"])
def test_a_moved_key_is_the_key_computed_there(model: dict[str, object], tmp_path: Path) -> None:
    """Layer 0 depends on token and position alone: under YaRN, and where layers turn by bases of their own."""
    engine = ReferenceEngine.load(write_tiny(tmp_path / "tiny.gguf", **model))  # type: ignore[arg-type]
    moved, fresh = opened(engine), opened(engine)
    moved.prefill(TOKENS[:40], 0)
    moved.shift(0, 40, 100)
    fresh.prefill([*TOKENS[40:90], *TOKENS[40:90], *TOKENS[:40]], 0)
    np.testing.assert_allclose(moved.witness().rows.keys[0], fresh.witness().rows.keys[0][100:], rtol=0, atol=2e-6)
    engine.close()


def test_what_choose_raises_takes_the_run_back(engine: ReferenceEngine) -> None:
    backend = opened(engine, scores="on")
    computed = backend.prefill(TOKENS[:30], 0)
    before, calls = image(backend.witness()), []

    def choose(_: np.ndarray) -> int:
        calls.append(1)
        if len(calls) == 3:
            backend.cancel()
        return 7

    with pytest.raises(Cancelled):
        backend.decode_until(5, 256, 30, computed.logits, choose)
    assert image(backend.witness()) == before
    with pytest.raises(InputRejected):
        backend.decode_until(5, 256, 30, computed.logits, lambda _: 10**6)
    assert image(backend.witness()) == before
    assert backend.take_mass().n_queries == 30


def test_an_abort_comes_in_the_last_layer_and_is_final(engine: ReferenceEngine) -> None:
    backend = opened(engine)
    backend.prefill(TOKENS[:10], 0)
    backend.abort_next()  # type: ignore[attr-defined]
    for _ in range(2):
        with pytest.raises(EngineFault, match="gave no answer"):
            backend.prefill(TOKENS[10:12], 10)
    other = opened(engine)
    other.prefill(TOKENS[:10], 0)


@pytest.mark.parametrize("spec", KEEPING)
def test_a_kv_engine_carries_a_session_by_recompute(spec: str, engine: ReferenceEngine) -> None:
    """The same policy and the same tokens retained as where there is surgery; rows computed anew for every evict."""
    retained = []
    for options, evict_by in (({"engine": spec}, "native"), ({}, "recompute")):
        sink = ListSink()
        backend = opened(engine, **options)
        policy = parse_policy("stream:sink=4,recent=28,block=8")
        config = {"run_id": "r", "session_id": "s", "allow_recompute": True, "evict_by": evict_by}
        with Session(backend, policy, sink, ManualClock(), **config) as session:  # type: ignore[arg-type]
            session.ensure_prefix(TOKENS[:60])
            session.evict(8, 40)
            session.decode(3, choose=lambda _: 9, stop_tokens=frozenset())
            retained.append(session.resident)
        evicts = [e for e in sink.events if e.op is Op.EVICT]
        assert {e.way for e in evicts} == {Way.RECOMPUTE}
    assert retained[0] == retained[1]


@pytest.mark.parametrize("spec", ["standard", *KEEPING])
def test_a_restored_session_goes_on_bit_for_bit(spec: str, engine: ReferenceEngine) -> None:
    """Also where a prefill of the same tokens would give other bits: the codes themselves come back."""
    backend = opened(engine, engine=spec)
    backend.prefill(TOKENS[:30], 0)
    decoded(backend, TOKENS[30:36], 30)
    saved = backend.snapshot()
    live = decoded(backend, TOKENS[36:40], 36)
    other = opened(engine, engine=spec)
    other.restore(saved)
    assert other.books() != backend.books()
    np.testing.assert_array_equal(decoded(other, TOKENS[36:40], 36), live)
    with pytest.raises(StateRejected, match="kv_engine"):
        opened(engine, engine="no-cache" if spec == "standard" else "standard").restore(saved)


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return print, ("a saved state was allowed to call this",)


def test_a_saved_engine_names_nothing_but_engines(engine: ReferenceEngine, capsys: pytest.CaptureFixture[str]) -> None:
    backend = opened(engine, engine="markov-rs")
    backend.prefill(TOKENS[:8], 0)
    header, _ = unwrap(backend.snapshot(), {})
    before = backend.books()
    with pytest.raises(StateRejected, match="no part of an engine's state"):
        backend.restore(wrap(header, pickle.dumps(("markov-rs", 8, {"rows": Harmful()}))))
    assert (backend.books(), capsys.readouterr().out) == (before, "")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"dtype": "float16"}, "allowed: float32, float64"),
        ({"engine": "markov"}, "unknown engine"),
        ({"engine": "windowed-checkpoint"}, "without an event"),
        ({"engine": "apollo"}, "carries no session"),
        ({"scores": "on", "engine": "markov-rs"}, "needs engine=standard"),
        ({"colour": "red"}, "option of reference"),
    ],
)
def test_options_that_cannot_be(options: dict[str, str], why: str, path: Path) -> None:
    with pytest.raises(UsageError, match=why):
        ReferenceEngine.load(path, options)
    with pytest.raises(UsageError, match=why):
        ReferenceEngine.check(path, replace(CONFIG, options=options))


def test_float64_rows_are_told_as_such(engine: ReferenceEngine) -> None:
    backend = opened(engine, dtype="float64")
    assert (backend.config.kv_type_k, backend.config.threads) == ("f64", 1)
    single = opened(engine)
    pair = [b.prefill(TOKENS[:40], 0).logits for b in (backend, single)]
    assert backend.witness().rows.keys[0].dtype == np.float64
    assert backend.kv_bytes()["resident"] == 2 * single.kv_bytes()["resident"]
    np.testing.assert_allclose(*pair, atol=5e-5)
