"""Native eviction beside our policies: the same tokens, rows equal at every token, figures that follow from them.

The pipelines run in this process, which is quicker: what they are asked for here does not harm it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from kvtape.backends.batching.config import BLOCK, Eviction
from kvtape.backends.batching.occupancy import Step
from kvtape.backends.batching.pipeline import BatchingPipeline
from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import ContextOverflow, UsageError
from kvtape.backends.protocol import SessionConfig
from kvtape.eval.batching.compare import check_versus, run_versus
from kvtape.eval.batching.policies import DEFAULT_POLICIES, policies_beside
from kvtape.eval.batching.prompts import prompts_from_seeds, prompts_from_text
from kvtape.eval.batching.report import agreement, curve_rows, versus_rows
from kvtape.eval.batching.tracks import BatchingTask, Lane, Prompt, Versus
from kvtape.eval.candidates import Candidate
from kvtape.eval.targets import Target, World
from kvtape.planner.events import Op
from kvtape.planner.specs import SpecError
from support.batching import batching_engine, batching_model, own_log_probs
from support.trials import TrialListSink

EVICTION = Eviction(most=4 * BLOCK)
POLICIES = (*DEFAULT_POLICIES, "class", "random", "tova")
N_NEW = 40


def target() -> Target:
    config = SessionConfig(chunk=128, kv_type_k="f32", kv_type_v="f32", options={"scores": "on"})
    return Target("openvino:scores=on", batching_engine(), config)


def task(continued: str = "text", seeds: range = range(2)) -> BatchingTask:
    engine = batching_engine()
    prompts = prompts_from_seeds(engine.tokenize, engine.detokenize, seeds, 300, N_NEW)
    return BatchingTask(prompts, N_NEW, 128, 1, cast("Any", continued))


def run(asked: BatchingTask, candidates: list[Candidate], world: World) -> list[Versus]:
    return run_versus(asked, batching_model(), EVICTION, target(), candidates, world, opened=BatchingPipeline)


@pytest.fixture(scope="module")
def compared() -> tuple[list[Versus], TrialListSink, list[Candidate]]:
    sink = TrialListSink()
    candidates = policies_beside(EVICTION, POLICIES)
    check_versus(task(), batching_model(), [EVICTION], target(), candidates)
    found = run_versus(
        task(),
        batching_model(),
        EVICTION,
        target(),
        candidates,
        World(sink, ManualClock(), "r"),
        opened=BatchingPipeline,
    )
    return found, sink, candidates


def test_every_policy_holds_as_many_rows_as_the_comparator_at_every_token(
    compared: tuple[list[Versus], TrialListSink, list[Candidate]],
) -> None:
    for versus in compared[0]:
        assert versus.since == 2
        expected = (300, 301, *range(142, 161), *range(129, 148))
        assert versus.native.rows == expected[:N_NEW]
        assert versus.dense.rows == tuple(range(300, 300 + N_NEW))
        for candidate, lane in versus.policies:
            assert lane.rows == versus.native.rows, candidate.label
            assert lane.scored is (True if candidate.wants_scores else None)


def test_both_sides_keeping_everything_say_the_same_of_the_same_tokens(
    compared: tuple[list[Versus], TrialListSink, list[Candidate]],
) -> None:
    for versus in compared[0]:
        assert versus.dense_difference < 1e-4
        own = own_log_probs(versus.prompt.tokens, versus.tokens)
        assert versus.dense.nll == pytest.approx([-p for p in own], abs=1e-4)
        # Up to its first evict the comparator is dense, and so are we.
        for lane in (versus.native, *(lane for _, lane in versus.policies)):
            assert lane.nll[: versus.since] == pytest.approx(versus.dense.nll[: versus.since], abs=1e-4)
            assert lane.nll[versus.since :] != pytest.approx(versus.dense.nll[versus.since :], abs=1e-2)
        text = batching_engine().detokenize(versus.tokens)
        assert versus.prompt.text.startswith(text.rstrip("\ufffd"))


def test_our_sessions_are_in_the_log_and_so_is_what_came_of_them(
    compared: tuple[list[Versus], TrialListSink, list[Candidate]],
) -> None:
    found, sink, candidates = compared
    assert [s.session_id for s in sink.sessions] == ["openvino-batching-0-0", "openvino-batching-0-1"]
    plans = [e for e in sink.events if e.op is Op.PLAN and e.session_id == sink.sessions[0].session_id]
    # Once down to the comparator's rows, once more when its block is full: 20 tokens later.
    assert len(plans) == 2 * len(candidates)
    # Whole blocks of one grid, as the comparator's, wherever the prompt ends.
    assert {b % BLOCK for e in sink.events if e.op is Op.EVICT for b in (e.start, e.stop)} == {0}
    assert [t.policy for t in sink.trials[:3]] == [EVICTION.label, "none", candidates[0].policy.canonical]
    assert [(t.start, t.stop, t.n_tokens) for t in sink.trials] == [(302, 340, 38)] * 2 * (2 + len(candidates))
    assert sink.trials[1].nll == pytest.approx(np.mean(found[0].dense.nll[2:]))


def test_speaking_for_itself_the_comparator_likes_its_own_tokens_best() -> None:
    """Which is why a given text is the default."""
    sink = World(TrialListSink(), ManualClock(), "r")
    candidates = policies_beside(EVICTION, ["stream"])
    found = run_versus(
        task("greedy", range(1)), batching_model(), EVICTION, target(), candidates, sink, opened=BatchingPipeline
    )
    native, dense, stream = versus_rows(EVICTION, found)
    assert native["nll"] < min(dense["nll"], stream["nll"])
    assert (stream["rows_equal"], stream["over_native_low"]) == (True, None)


def planted(nll: list[float], rows: list[int], policy_rows: list[int], label: str) -> Versus:
    return Versus(
        prompt=Prompt(label, (1,) * 60, "x"),
        tokens=(5, 6, 7),
        steps=(Step(40, 2), Step(60, 2), Step(61, 2), Step(62, 1)),
        since=1,
        native=Lane(tuple(nll), tuple(rows)),
        native_dense=(1.0, 1.0, 1.0),
        dense=Lane((1.0, 1.0, 2.0), (60, 61, 62)),
        policies=((policies_beside(EVICTION, ["stream"])[0], Lane((1.0, 3.0, 3.0), tuple(policy_rows))),),
    )


def test_rows_of_the_report_follow_from_the_lanes() -> None:
    found = [
        planted([1.0, 2.0, 4.0], [60, 61, 30], [60, 61, 30], "a"),
        planted([9.0, 4.0, 4.0], [60, 61, 30], [60, 61, 31], "b"),
    ]
    native, dense, stream = versus_rows(EVICTION, found)
    assert (native["nll"], dense["nll"], stream["nll"]) == (3.5, 1.5, 3.0)
    assert (native["over_dense"], native["over_native"], dense["over_dense"]) == (2.0, None, None)
    assert (stream["over_native"], stream["over_dense"]) == (-0.5, 1.5)
    # Student with one degree of freedom: 12.706 times half the distance of two.
    assert stream["over_native_high"] == pytest.approx(-0.5 + 12.7062 * 0.5, abs=1e-3)
    assert (stream["n"], stream["rows"], stream["rows_most"], stream["rows_equal"]) == (4, 45.75, 61, False)
    assert (native["kept"], native["kept_by_layer"], stream["kept"]) == ("unknown", "unknown", "in the log")
    assert curve_rows(EVICTION, found[:1])[1] == {
        "comparator": EVICTION.label, "prompt": "a", "step": 3, "last_step": 3, "tokens": 62, "last_tokens": 62,
        "blocks": 1, "rows_least": 30, "rows_most": 30,
    }  # fmt: skip
    said = agreement(found)
    assert said == {"max_difference": 1.0, "limit": 0.01, "same_model": False}
    assert agreement([replace(found[0], native_dense=(1.0, 1.0, 2.001))])["same_model"] is True


def test_policies_take_what_they_do_not_say_from_the_comparator() -> None:
    wide = Eviction(start=64, recent=32, most=256, crush=2, window=16)
    labels = [c.label for c in policies_beside(wide, ["stream", "h2o", "snapkv", "class:sink=4", "random"], 7)]
    assert labels == [
        "stream:sink=64,recent=256,split=no",
        "h2o:budget=352,sink=64,recent=32",
        "snapkv:budget=352,sink=64,recent=32,window=16",
        "class:budget=352,sink=4,recent=32",
        "random:budget=352,sink=64,recent=32,seed=7",
    ]
    for text, error, says in (
        ("none", UsageError, "never evicts"),
        ("class:block=16", UsageError, "blocks of 16 tokens beside the comparator's of 32"),
        ("h3o", SpecError, "did you mean 'h2o'"),
    ):
        with pytest.raises(error, match=says):
            policies_beside(wide, [text])


def test_what_would_compare_nothing_is_refused_before_anything_runs() -> None:
    candidates = policies_beside(EVICTION, ["stream"])
    with pytest.raises(UsageError, match=r"keeps up to 320 rows of a prompt of 300 tokens.*--tokens"):
        check_versus(task(), batching_model(), [Eviction(most=9 * BLOCK)], target(), candidates)
    long = Prompt("long", (5,) * 2040, "x")
    with pytest.raises(ContextOverflow, match="2081 tokens"):
        check_versus(BatchingTask((long,), N_NEW, 128, 1), batching_model(), [EVICTION], target(), candidates)


def test_prompts_of_a_text_are_its_stretches_each_with_what_follows() -> None:
    def encode(text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(tokens: Any) -> str:
        return "".join(chr(t) for t in tokens)

    text = "".join(chr(97 + i % 26) for i in range(50))
    first, second = prompts_from_text(encode, decode, text, range(2), 10, 4)
    assert (decode(first.tokens), first.text, first.label) == (text[:10], text[10:26], "stretch 0")
    assert (decode(second.tokens), second.text) == (text[10:20], text[20:36])
    with pytest.raises(UsageError, match=r"the text has 50 tokens, and 5 prompts of 10 .* need 66"):
        prompts_from_text(encode, decode, text, range(5), 10, 4)
    cut = prompts_from_text(encode, decode, "a" * 10 + "\ufffdbc\ufffdd" + "e" * 20, range(1), 10, 4)
    assert cut[0].text == "bc"


def test_a_policy_s_own_budget_shows_where_rows_are_not_equal() -> None:
    sink = World(TrialListSink(), ManualClock(), "r")
    candidates = policies_beside(EVICTION, ["class:budget=97"])
    found = run_versus(
        task("text", range(1)), batching_model(), EVICTION, target(), candidates, sink, opened=BatchingPipeline
    )
    row = versus_rows(EVICTION, found)[2]
    assert (row["rows_equal"], row["rows_most"] <= 97) == (False, True)
