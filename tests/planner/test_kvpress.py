"""Beside kvpress: on the attention of one model both keep the same tokens at the same budget.

`golden/kvpress.json` was written once by `golden/make_kvpress_golden.py`, which imports nothing of kvtape. The named
differences (docs/policies.md): kvpress keeps a set of tokens for each layer and KV head, kvtape one for the session;
and kvtape never evicts the last token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvtape.planner.blocks import Block, CacheClass
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.scores import MassHistory, pool_scores, score_blocks, sum_layers
from kvtape.planner.specs import PolicySpec, parse_policy

GOLDEN = json.loads((Path(__file__).parent / "golden" / "kvpress.json").read_text(encoding="utf-8"))
CAN = Capabilities(remove_middle=True, attention_scores=True)

Case = dict[str, Any]


def cases(model: str) -> list[Any]:
    """One parameter a case and budget: the case and the budget."""
    return [
        pytest.param(case, int(budget), id=f"{case['press']}-{case['n']}-layer{case['layer']}-{budget}-{i}")
        for i, case in enumerate(GOLDEN["cases"])
        if case["model"] == model
        for budget in case["kept"]
    ]


def tokens(n: int) -> list[Block]:
    return [Block(i, i, i + 1, "user", CacheClass.VOLATILE) for i in range(n)]


def policy_of(case: Case, budget: int) -> PolicySpec:
    """The spec that means the press."""
    options, layer = case["options"], case["layer"]
    window, kernel = options.get("window_size"), options.get("kernel_size")
    return parse_policy(
        {
            "streaming_llm": f"stream:sink={options.get('n_sink')},recent={budget - options.get('n_sink', 0)},block=1",
            "observed_attention": f"h2o:budget={budget},recent=1,norm=mean,layers={layer},block=1",
            "tova": f"tova:budget={budget},layers={layer},block=1",
            "snapkv": f"snapkv:budget={budget},window={window},pool={kernel},layers={layer},block=1",
        }[case["press"]]
    )


def kept(policy: PolicySpec, blocks: Any, budget: int) -> list[int]:
    plan = policy.plan(blocks, budget=budget, capabilities=CAN)
    assert plan is not None
    return [p for r in plan.keep for p in range(r.start, r.stop)]


def with_the_last(theirs: list[int], scores: list[float], n: int) -> list[int]:
    """What a press would keep that may not give up the last token: that instead of the lowest of its choice."""
    if n - 1 in theirs:
        return theirs
    return sorted({*theirs, n - 1} - {min(theirs, key=lambda i: scores[i])})


def measured(case: Case, policy: PolicySpec) -> tuple[np.ndarray, np.ndarray]:
    """Positions and scores by kvtape's own way, from the attention that the model paid."""
    n, request = case["n"], policy.score_request
    assert request is not None
    rows = sorted((m for m in GOLDEN["mass"] if m["n"] == n), key=lambda m: m["layer"])
    asked = "all" if request.kind == "accumulated" else "last" if case["press"] == "tova" else "window"
    queries = n if request.kind == "accumulated" else request.queries
    assert queries == {"all": n, "last": 1, "window": rows[0]["window_size"]}[asked]
    positions = np.arange(n if asked == "all" else n - queries)
    mass = np.array([m[asked] for m in rows])[:, positions]
    scores = sum_layers(mass, [m["layer"] for m in rows], request.layers)
    if asked == "all":
        scores = MassHistory().add(positions, scores, n, n).scores(positions, policy.norm)
    return positions, pool_scores(scores, policy.pool)


@pytest.mark.parametrize(("case", "budget"), cases("shared"))
def test_the_same_attention_keeps_the_same_tokens(case: Case, budget: int) -> None:
    """From the model's attention on: measuring, pooling, dividing and planning are all kvtape's own."""
    policy, blocks = policy_of(case, budget), tokens(case["n"])
    (theirs,) = case["kept"][str(budget)]
    if case["press"] == "streaming_llm":
        assert kept(policy, blocks, budget) == theirs
        return
    positions, scores = measured(case, policy)
    (given,) = case["scores"]
    # Means over heads and queries there, sums here: one factor for all tokens.
    factor = GOLDEN["heads"] * case["options"].get("window_size", 1)
    np.testing.assert_allclose(scores, np.array(given)[positions] * factor, rtol=1e-5)
    assert kept(policy, score_blocks(blocks, positions, scores), budget) == with_the_last(theirs, given, case["n"])


@pytest.mark.parametrize(("case", "budget"), cases("grouped"))
def test_each_head_keeps_what_its_scores_keep(case: Case, budget: int) -> None:
    """kvpress chooses for each KV head: given the scores of one, the planner chooses as it did."""
    policy, n = policy_of(case, budget), case["n"]
    for head, theirs in enumerate(case["kept"][str(budget)]):
        if case["press"] == "streaming_llm":
            assert kept(policy, tokens(n), budget) == theirs
            continue
        scores = case["scores"][head]
        assert kept(policy, score_blocks(tokens(n), np.arange(n), np.array(scores)), budget) == with_the_last(
            theirs, scores, n
        )


def test_the_differences_that_are_named_do_occur() -> None:
    """Else nothing above would have shown them: heads that disagree, and a last token that was given up."""
    grouped = [k for c in GOLDEN["cases"] if c["model"] == "grouped" for k in c["kept"].values()]
    assert any(a != b for a, b in grouped)
    observed = [c for c in GOLDEN["cases"] if c["press"] == "observed_attention"]
    assert any(c["n"] - 1 not in heads for c in observed for kept_ in c["kept"].values() for heads in kept_)
    assert GOLDEN["versions"]["kvpress"] == "0.5.5"
