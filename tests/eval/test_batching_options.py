"""Proof rows of the sparse options: what is right is shown right, what is wrong here is reported wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvtape.backends.batching.config import BLOCK, BatchingConfig
from kvtape.backends.batching.isolated import IsolatedPipeline, OpenPipeline
from kvtape.backends.batching.pipeline import BatchingPipeline
from kvtape.backends.errors import UsageError
from kvtape.eval.batching.cases import Case, option_cases
from kvtape.eval.batching.option_report import option_rows, option_verdicts
from kvtape.eval.batching.prompts import prompts_from_seeds
from kvtape.eval.batching.proofs import (
    LIMIT_DIFFERENCE,
    LIMIT_EXCESS,
    Proof,
    Works,
    _grounded,
    _judged,
    prove,
    verdicts,
)
from support.batching import batching_engine, batching_model

CASES = option_cases(300, 16, budget=4 * BLOCK, chunk=128)


def proven(chosen: Sequence[tuple[str, str]], opened: OpenPipeline) -> list[Proof]:
    engine = batching_engine()
    prompt = prompts_from_seeds(engine.tokenize, engine.detokenize, range(1), 300, 16)[0]
    cases = [c for c in CASES if (c.option, c.setting) in chosen]
    assert len(cases) == len(chosen)
    return prove(batching_model(), prompt, 16, cases, opened=opened)


def test_what_is_right_here_is_dense_s_numbers_where_nothing_is_left_out_and_costs_little_where_something_is() -> None:
    """In this process, which these options do not harm."""
    whole, trishape, evicted, crush, rkv, prefix = proven(
        [
            ("xattention", "threshold=1, whole prompt"),
            ("kvcrush", "budget for all"),
            ("adaptive_rkv", "most=128"),
            ("trishape", "keeps 32 + 64, pieces of 32"),
            ("eviction_sum", "most=128"),
            ("prefix_caching", "second run"),
        ],
        BatchingPipeline,
    )
    for proof in (whole, crush, prefix):
        assert (proof.works, proof.why, proof.ids_equal, proof.repeatable) == ("true", None, True, True)
        assert proof.max_difference is not None
        assert proof.max_difference < 1e-4
        assert proof.limit == LIMIT_DIFFERENCE
    for proof in (trishape, evicted):
        assert proof.works == "true"
        assert proof.max_difference is not None
        assert proof.excess is not None
        assert proof.max_difference > 0.1
        assert abs(proof.excess) < LIMIT_EXCESS == proof.limit
        assert proof.n == (315 if proof.case.option == "trishape" else 14)
    assert rkv.works == "error"
    assert "Token diversity must be registered before each eviction" in str(rkv.why)


def test_what_is_wrong_here_is_reported_wrong_and_ends_no_process_but_its_own() -> None:
    pieces, rotation = proven(
        [("xattention", "threshold=1, last 100 dense, pieces of 128"), ("rotation", "most=96")], IsolatedPipeline
    )
    # Of a prompt in pieces it is wrong even where it keeps every block. It reads memory that nobody wrote, so that how
    # far it is off is another matter in every run, and a run may end in numbers that are none.
    assert pieces.works in ("false", "error")
    assert rotation.works == "error"
    assert verdicts([pieces])["xattention"] != "true"


def case(option: str, *, exact: bool, chunk: int = 64) -> Case:
    return Case(option, f"{exact}", BatchingConfig(8, chunk), exact)


@pytest.mark.parametrize(
    ("exact", "difference", "excess", "same", "repeatable", "works", "why"),
    [
        (True, 9e-4, 0.0, True, True, "true", None),
        (True, 2e-3, 0.0, True, True, "false", "leaves nothing out, and a log-probability is 0.002 from dense's"),
        (True, 0.0, 0.0, False, True, "false", "leaves nothing out, and says other tokens than dense"),
        (True, 0.0, 0.0, True, False, "false", "the same prompt gave other numbers the second time"),
        (False, 3.0, 0.24, False, True, "true", None),
        (False, 3.0, 0.26, False, True, "false", "costs 0.26 nats a token"),
        (False, 3.0, -0.3, False, False, "false", "the same prompt gave other numbers the second time"),
    ],
)
def test_verdicts_of_a_row(
    exact: bool, difference: float, excess: float, same: bool, repeatable: bool, works: Works, why: str | None
) -> None:
    row = _judged(
        case("x", exact=exact), n=9, max_difference=difference, excess=excess, ids_equal=same, repeatable=repeatable
    )
    assert (row.works, row.why) == (works, why)
    assert option_rows([row])[0]["works"] is (works == "true")


def test_no_setting_is_better_than_the_same_computation_that_leaves_nothing_out() -> None:
    rows = [
        Proof(case("a", exact=True), "false", "wrong"),
        Proof(case("a", exact=False), "true", None),
        Proof(case("a", exact=False, chunk=512), "true", None),
        Proof(case("b", exact=False), "true", None),
    ]
    assert [row.works for row in _grounded(rows)] == ["false", "false", "true", "true"]


def test_an_option_works_only_if_all_of_it_does() -> None:
    def rows(option: str, *works: tuple[bool, Works]) -> list[Proof]:
        return [Proof(case(option, exact=exact), said, None) for exact, said in works]

    assert verdicts(
        [
            *rows("all", (True, "true"), (False, "true")),
            *rows("one", (True, "true"), (False, "true"), (False, "error")),
            *rows("none", (True, "true"), (False, "error"), (False, "error")),
            *rows("wrong", (True, "false"), (False, "true")),
            *rows("exact", (True, "error")),
        ]
    ) == {"all": "true", "one": "false", "none": "error", "wrong": "false", "exact": "error"}
    assert option_verdicts(
        [*rows("yes", (True, "true")), *rows("no", (True, "false")), *rows("bad", (True, "error"))]
    ) == {
        "yes": True,
        "no": False,
        "bad": "error",
    }


def test_there_is_a_row_for_every_option_with_and_without_loss() -> None:
    options = {c.option for c in CASES}
    assert options == {
        "xattention", "trishape", "eviction_sum", "eviction_norm_sum", "snapkv_window_0", "kvcrush", "adaptive_rkv",
        "rotation", "prefix_caching",
    }  # fmt: skip
    for option in options - {"prefix_caching"}:
        assert {c.exact for c in CASES if c.option == option} == {True, False}
    assert len({(c.option, c.setting) for c in CASES}) == len(CASES)
    large, wide = {"budget": 128, "chunk": 512}, {"budget": 256, "chunk": 64}
    for sizes, says in ((large, "pieces of 512"), (wide, "evicts nothing")):
        with pytest.raises(UsageError, match=says):
            option_cases(300, 16, **sizes)
