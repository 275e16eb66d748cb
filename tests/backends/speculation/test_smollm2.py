"""The real model: quantised weights and a large vocabulary, where a call for several tokens easily gives others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.protocol import Engine, Logits, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.backends.session import Session
from kvtape.backends.speculation.spec import Speculation
from kvtape.cli.models import demo_model
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink

pytestmark = pytest.mark.contract("I7")
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"flash_attention": "on", "uncertified": True},
    "openvino": {"kv_type_k": "f32", "kv_type_v": "f32"},
}
PROMPT = "The capital of France is"


@pytest.fixture(scope="module", params=sorted(CONFIGS))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    loaded = open_engine(request.param, demo_model())
    yield loaded
    loaded.close()


class Told:
    """Right and wrong drafts by turns."""

    spec = "told"

    def __init__(self, tape: Sequence[int]) -> None:
        self._tape, self._calls = tape, 0

    def draft(self, tape: Sequence[int], at_most: int) -> Sequence[int]:
        self._calls += 1
        right = (4, 0, 7, 1)[self._calls % 4]
        true = self._tape[len(tape) : len(tape) + right + 2]
        return [t if i < right else (t + 1) % 40_000 for i, t in enumerate(true)]

    def close(self) -> None:
        pass


def generate(
    engine: Engine, ids: Sequence[int], drafter: Told | None
) -> tuple[tuple[int, ...], Logits, dict[str, int]]:
    backend = engine.open(SessionConfig(n_ctx=256, chunk=64, threads=1, **CONFIGS[engine.name]))
    speculation = None if drafter is None else Speculation("told", lambda _: drafter)
    with Session(
        backend, parse_policy("none"), ListSink(), ManualClock(), run_id="r", session_id="s", speculation=speculation
    ) as session:
        session.ensure_prefix(ids)
        session.decode(24, stop_tokens=frozenset())
        assert session.logits is not None
        return session.tape, session.logits, session.explain().counters


def test_the_demo_model_says_the_same(engine: Engine) -> None:
    ids = engine.tokenize(PROMPT)
    tape, logits, _ = generate(engine, ids, None)
    drafted, same, counters = generate(engine, ids, Told(tape))
    assert drafted == tape
    assert counters["accepted_tokens"] > 0
    assert counters["rejected_tokens"] > 0
    assert counters["decode_calls"] < 24
    if engine.name == "llama":
        np.testing.assert_array_equal(same, logits)
    else:
        np.testing.assert_allclose(same, logits, atol=1e-3)
