"""The shows on the real model, small: what the question attends to is kept and found again; windows keep their ends.

The full ones are `benchmarks/bench_eval.py --full` and the tables in docs/policies.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.protocol import SessionConfig
from kvtape.cli.models import demo_model
from kvtape.eval.candidates import candidates_of
from kvtape.eval.needle import NeedleTask, prepare, run_needle
from kvtape.eval.needle_report import needle_rows
from kvtape.eval.places import regions_of
from kvtape.eval.targets import NullSink, Target, World
from support.engines import NATIVE, load_engine


@pytest.fixture(scope="module", params=NATIVE)
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    loaded = load_engine(request.param, demo_model())
    yield Target(request.param, loaded, SessionConfig(options={"scores": "on"}))
    loaded.close()


def recall(
    target: Target, policies: list[str], seeds: range, where: tuple[str, ...], n_tokens: int
) -> dict[tuple[str, str], dict[str, float]]:
    """Rows of the needle task by (region, first word of the policy), at a budget of 128."""
    candidates = candidates_of(policies, [128])
    spans = [(c.policy.sink, c.policy.recent) for c in candidates if c.policy.name == "stream"]
    task = NeedleTask("city", tuple(seeds), where, regions_of(spans), n_tokens)
    trials = run_needle(
        task, [target], prepare(task, [target], candidates), candidates, World(NullSink(), ManualClock(), "r")
    )
    return {(row["region"], row["policy"].partition(":")[0]): row for row in needle_rows(trials)}


def test_what_the_question_attends_to_is_found_again(target: Target) -> None:
    policies = ["stream", "snapkv:sink=4,recent=32,queries=probe"]
    rows = recall(target, policies, range(4), ("middle",), 280)
    dense, window, scored = (rows["middle", name] for name in ("none", "stream", "snapkv"))
    assert dense["recall"] == 1
    assert scored["recall_low"] > window["recall_high"]
    assert scored["needle_kept"] == 1
    assert window["needle_kept"] == 0
    assert max(window["kept"], scored["kept"]) <= 128


def test_a_window_recalls_its_sink_and_its_recent_region_as_dense_does(target: Target) -> None:
    rows = recall(target, ["stream:sink=32"], range(1, 3), ("sink", "recent"), 200)
    for region in ("sink", "recent"):
        assert rows[region, "none"]["recall"] == rows[region, "stream"]["recall"] == 1
        assert rows[region, "stream"]["needle_kept"] == 1
        assert rows[region, "stream"]["kept"] == 128
