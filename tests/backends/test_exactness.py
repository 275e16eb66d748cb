"""Both engines against the float64 oracle, on tiny f32 models, through every way of changing what is resident.

Every logit of every prefilled or decoded token is compared. The oracle knows nothing of engines, lineages or folds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.protocol import Engine
from kvtape.planner.events import Op, Way
from kvtape.planner.residency import ResidencyState, apply
from kvtape.replay.lineage import LineageBuilder
from kvtape.replay.performer import Performer
from support.engines import ENGINES, load_engine, open_f32
from support.oracle import OracleModel
from support.scripted import Script
from support.sessions import play_on_oracle
from support.tiny_gguf import write_tiny

SHAPES = {
    "llama": {"arch": "llama", "n_head": 4, "n_head_kv": 2, "head_dim": 32},
    "qwen2": {"arch": "qwen2"},
    "qwen3": {"arch": "qwen3"},
}
TOLERANCE = 1e-5
"""Largest difference of a logit (they reach 4); two f32 forwards of one graph differ by about 1e-6."""


def _tokens(n: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, 300, n)]


def gap(s: Script) -> None:
    s.prefill(_tokens(60, 1))
    s.evict(4, 30)
    s.decode(_tokens(6, 2))
    s.evict(35, 40)
    s.prefill(_tokens(20, 3))


def rebased(s: Script) -> None:
    s.prefill(_tokens(60, 1))
    s.evict(4, 30, way=Way.REBASED)
    s.decode(_tokens(6, 2))
    s.evict(35, 40, way=Way.REBASED)
    s.prefill(_tokens(20, 3))


def compaction(s: Script) -> None:
    """Gaps first, closed later by one shift."""
    s.prefill(_tokens(60, 1))
    s.evict(4, 30)
    s.decode(_tokens(3, 2))
    s.shift(30, 63, -26)
    s.decode(_tokens(3, 3))


def recompute(s: Script) -> None:
    s.prefill(_tokens(60, 1))
    s.evict(4, 30, way=Way.RECOMPUTE)
    s.decode(_tokens(6, 2))
    s.evict(35, 40, way=Way.RECOMPUTE)
    s.prefill(_tokens(20, 3))


def admit_in_place(s: Script) -> None:
    s.prefill(_tokens(60, 1))
    (block,) = s.evict(10, 30, cold=True)
    s.decode(_tokens(4, 2))
    s.admit(block)
    s.decode(_tokens(4, 3))


def admit_appended(s: Script) -> None:
    s.prefill(_tokens(60, 1))
    (block,) = s.evict(10, 30, cold=True)
    s.decode(_tokens(4, 2))
    s.admit(block, append=True)
    s.decode(_tokens(4, 3))
    s.prefill(_tokens(10, 4))


def admit_into_rebased(s: Script) -> None:
    """The closed hole is opened again by a shift, then the block comes back to where it was."""
    s.prefill(_tokens(60, 1))
    (block,) = s.evict(10, 30, cold=True, way=Way.REBASED)
    s.decode(_tokens(4, 2))
    s.shift(10, 44, 20)
    s.admit(block)
    s.decode(_tokens(4, 3))


def snapshot_restore(s: Script) -> None:
    s.prefill(_tokens(40, 1))
    s.evict(10, 20)
    saved = s.snapshot()
    s.decode(_tokens(5, 2))
    s.evict(2, 6)
    s.restore(saved)
    s.decode(_tokens(5, 3))
    s.prefill(_tokens(10, 4))


def turns_with_holes(s: Script) -> None:
    """Turns of a chat under a lossy policy: the hole is forgotten, the prompt diverges, the run goes on past it."""
    s.prefill(_tokens(50, 1))
    s.evict(4, 20)
    s.decode(_tokens(8, 2))
    s.truncate(52)
    s.prefill(_tokens(30, 3))
    s.evict(25, 40)
    s.decode(_tokens(5, 4))
    s.truncate(45)
    s.prefill(_tokens(12, 5))


def refill(s: Script) -> None:
    s.prefill(_tokens(50, 1))
    s.evict(10, 30)
    s.decode(_tokens(5, 2))
    s.refill(10, 30, 10)
    s.decode(_tokens(5, 3))


SCENARIOS: dict[str, Callable[[Script], None]] = {
    f.__name__: f
    for f in (
        gap,
        rebased,
        compaction,
        recompute,
        admit_in_place,
        admit_appended,
        admit_into_rebased,
        snapshot_restore,
        turns_with_holes,
        refill,
    )
}


@dataclass(frozen=True)
class Subject:
    engine: Engine
    oracle: OracleModel


@pytest.fixture(scope="module", params=[(e, s) for e in ENGINES for s in SHAPES], ids="-".join)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Subject]:
    name, shape = request.param
    path = write_tiny(tmp_path_factory.mktemp("tiny") / f"{shape}.gguf", **SHAPES[shape])
    engine = load_engine(name, Path(path))
    yield Subject(engine, OracleModel(path))
    engine.close()


def largest_difference(subject: Subject, script: Script) -> float:
    """Over every logit that the engine computed for a prefilled or decoded token."""
    want = play_on_oracle(script.events, script.tokens, subject.oracle)
    backend = open_f32(subject.engine)
    tokens = {seq: row.tokens or () for seq, row in script.tokens.items()}
    decoded = {e.seq for e in script.events if e.op == Op.DECODE}
    ends = {(seq, len(row)) for seq, row in tokens.items()}
    # Prefills stay whole, as an engine runs them; a decode shows every token's logits.
    places = frozenset(k for k in want if k in ends or k[0] in decoded)
    performer, state = Performer(backend, LineageBuilder(), places, tokens), ResidencyState()
    for event in script.events:
        after = apply(state, event)
        if event.op != Op.OPEN:
            assert performer.perform(event, state, after) == []
        assert backend.books() == after.layout
        state = after
    backend.close()
    assert set(performer.logits) == set(places)
    return max(float(np.abs(performer.logits[k] - want[k]).max()) for k in places)


@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_engine_agrees_with_the_oracle(subject: Subject, scenario: str) -> None:
    script = Script()
    SCENARIOS[scenario](script)
    assert largest_difference(subject, script) <= TOLERANCE


def test_the_comparison_has_teeth(subject: Subject) -> None:
    """An engine that had not evicted would be off by far more than the tolerance."""
    evicted, whole = Script(), Script()
    gap(evicted)
    for event in evicted.events:
        if event.op in (Op.PREFILL, Op.DECODE):
            tokens = list(evicted.tokens[event.seq].tokens or ())
            whole.prefill(tokens) if event.op == Op.PREFILL else whole.decode(tokens)
    with_evicts = play_on_oracle(evicted.events, evicted.tokens, subject.oracle)
    without = play_on_oracle(whole.events, whole.tokens, subject.oracle)
    last = with_evicts[max(with_evicts)], without[max(without)]
    assert np.abs(last[0] - last[1]).max() > 100 * TOLERANCE
