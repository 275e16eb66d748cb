"""The reference beside llama.cpp and OpenVINO: the same surgery on all three, the same rows, logits and attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtape.backends.protocol import Backend, SessionConfig
from kvtape.planner.ranges import RangeSet
from support.engines import ENGINES, load_engine
from support.tiny_gguf import write_tiny

LOGITS = 2e-5
"""Largest difference of f32 logits, whose standard deviation on these models is near 1 (measured: 3e-6)."""

MASS = 1e-4
"""Relative to a row's mass, and absolute beside it (measured: 2e-6)."""

ROWS = 2e-5
"""Of keys and values, whose components are near 1."""

TOKENS = [int(t) for t in np.random.default_rng(11).integers(3, 259, 160)]
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama", "n_embd": 128, "n_head": 4, "n_head_kv": 2},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3"},
}


@contextmanager
def on_all(path: Path) -> Iterator[list[Backend]]:
    engines = [load_engine(name, path) for name in ENGINES]
    config = SessionConfig(
        n_ctx=256, chunk=32, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=256, options={"scores": "on"}
    )
    backends = [engine.open(config) for engine in engines]
    yield backends
    for backend, engine in zip(backends, engines, strict=True):
        backend.close()
        engine.close()


class Session:
    """The same calls on every backend, compared after each."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self.backends, self.logits = backends, [np.empty(0, np.float32) for _ in backends]

    def does(self, call: Callable[[Backend], Any]) -> list[Any]:
        said = [call(backend) for backend in self.backends]
        self.same_rows()
        return said

    def computes(self, call: Callable[[Backend], Any]) -> None:
        self.logits = [done.logits.copy() for done in self.does(call)]
        *others, own = self.logits
        for other in others:
            np.testing.assert_allclose(own, other, rtol=0, atol=LOGITS)

    def decode(self, tokens: list[int], start: int) -> None:
        def run(backend: Backend) -> Any:
            told = iter(tokens)
            return backend.decode_until(len(tokens), 256, start, self.logits[0], lambda _: next(told))

        self.computes(run)

    def same_rows(self) -> None:
        """Retained sets, positions, and every key and value of every layer."""
        *others, own = self.backends
        seen = own.witness()
        order = np.argsort(seen.cache_positions)
        for other in others:
            assert other.books() == own.books()
            theirs = other.witness()
            at = np.argsort(theirs.cache_positions)
            np.testing.assert_array_equal(theirs.cache_positions[at], seen.cache_positions[order])
            for part in ("keys", "values"):
                for mine, rows in zip(getattr(seen.rows, part), getattr(theirs.rows, part), strict=True):
                    np.testing.assert_allclose(mine[order], rows[at], rtol=0, atol=ROWS)

    def same_mass(self, ask: Callable[[Backend], Any]) -> None:
        *others, own = self.does(ask)
        for other in others:
            np.testing.assert_array_equal(other.tape_positions, own.tape_positions)
            assert (other.layers, other.n_queries) == (own.layers, own.n_queries)
            np.testing.assert_allclose(own.mass, other.mass, rtol=MASS, atol=MASS)
            np.testing.assert_allclose(own.peak, other.peak, rtol=MASS, atol=MASS)


@pytest.mark.parametrize("model", MODELS)
def test_evicts_shifts_and_admits_agree_on_all_three(model: str, tmp_path: Path) -> None:
    with on_all(write_tiny(tmp_path / "tiny.gguf", **MODELS[model])) as backends:
        session = Session(backends)
        session.computes(lambda b: b.prefill(TOKENS[:80], 0))
        blocks = {id(b): b.export_block(16, 32) for b in backends}
        session.does(lambda b: b.evict(40, 56))
        session.does(lambda b: b.evict(16, 32))
        session.decode(TOKENS[80:86], 80)
        session.does(lambda b: b.shift(56, 86, -16))
        session.does(lambda b: b.shift(32, 70, -16))
        session.computes(lambda b: b.prefill(TOKENS[86:90], 86))
        session.same_mass(lambda b: b.take_mass())
        session.does(lambda b: b.admit(blocks[id(b)], 16, 58))  # appended: its keys are turned on
        session.decode(TOKENS[90:96], 90)
        session.same_mass(lambda b: b.score(TOKENS[100:104], 96))
        session.same_mass(lambda b: b.score(TOKENS[86:96], 86))
        session.does(lambda b: b.truncate(92))
        session.does(lambda b: b.evict(16, 32))
        session.does(lambda b: b.shift(16, 58, 16))
        session.computes(lambda b: b.refill(TOKENS[16:32], 16, 16))
        session.decode(TOKENS[92:95], 92)
        session.same_mass(lambda b: b.take_mass())
        kept = RangeSet([(0, 10), (60, 95)])
        session.computes(lambda b: b.rebuild(kept, TOKENS[:10] + TOKENS[60:95]))
        session.decode(TOKENS[95:98], 95)
        session.same_mass(lambda b: b.take_mass())


def test_two_mechanisms_one_retained_set_and_other_numbers(tmp_path: Path) -> None:
    """Surgery keeps rows that had seen what went; a recompute does not: equal sets, logits that differ in the open."""
    engine = load_engine("reference", write_tiny(tmp_path / "tiny.gguf"))
    surgery, recompute = (engine.open(SessionConfig(n_ctx=256)) for _ in range(2))
    for backend in (surgery, recompute):
        backend.prefill(TOKENS[:60], 0)
    surgery.evict(8, 40)
    surgery.shift(40, 60, -32)
    recompute.rebuild(RangeSet([(0, 8), (40, 60)]), TOKENS[:8] + TOKENS[40:60])
    assert surgery.books() == recompute.books()
    own, new = surgery.witness().rows, recompute.witness().rows
    np.testing.assert_allclose(own.keys[0], new.keys[0], atol=ROWS)
    assert np.abs(own.keys[1][8:] - new.keys[1][8:]).max() > 100 * ROWS
    np.testing.assert_array_equal(own.keys[1][:8], new.keys[1][:8])
    after = [b.prefill(TOKENS[60:64], 60).logits for b in (surgery, recompute)]
    assert np.abs(after[0] - after[1]).max() > 100 * LOGITS
    engine.close()
