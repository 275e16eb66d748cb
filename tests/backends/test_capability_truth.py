"""Capabilities are the truth: the whole struct verbatim in every configuration, each flag executed or refused.

A true flag is executed by the scenarios of the conformance suite that need it, a false one by the scenario that tries
and compares books and every row of the memory before and after; both are the same for every engine. What only one
engine can be asked (the exact numbers of a rotation, what a false flag would do wrong) is in `test_llama_gates` and
`test_openvino_capabilities`, on the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.protocol import Backend, SessionConfig
from kvtape.testing.conformance import CONFORMANCE_CONFIG, SCENARIOS, Laboratory, Scenario
from support.capability_table import FLAGS, REFUSED, ROWS, Refused, Row, config_of, engine_of, open_row, table

pytestmark = pytest.mark.contract("I2")

EXECUTED = {
    "remove_tail": "truncate",
    "remove_middle": "evict",
    "position_shift": "shift",
    "cold_store": "admit_in_place",
    "recompute_range": "refill",
    "snapshot_state": "snapshot_and_restore",
    "attention_scores": "take_mass",
}
"""The scenario that carries out what a flag promises."""

SCENARIO = {s.name: s for s in SCENARIOS}
PAIRS = [(row, flag) for row in ROWS for flag in EXECUTED]


def named(value: object) -> str | None:
    return (
        value.name if isinstance(value, Row) else f"{value.engine}-{value.of}" if isinstance(value, Refused) else None
    )


@pytest.mark.parametrize("row", ROWS, ids=named)
def test_the_whole_struct(row: Row) -> None:
    backend = open_row(row)
    assert backend.capabilities == row.expected
    for flag, value in asdict(row.expected).items():
        assert (backend.refusal(flag) is None) == bool(value), flag
    backend.close()


@pytest.mark.parametrize("refused", REFUSED, ids=named)
def test_what_cannot_be_opened_says_why(refused: Refused) -> None:
    with pytest.raises(UsageError, match=refused.why):
        open_row(refused)


def factory(row: Row) -> Callable[[SessionConfig], Backend]:
    """Sessions of the row, whatever else a scenario asks for."""

    def opened(config: SessionConfig) -> Backend:
        asked = config_of(row, config)
        return engine_of(row).open(asked)

    return opened


@cache
def laboratory(row_name: str) -> Laboratory:
    row = next(r for r in ROWS if r.name == row_name)
    return Laboratory(factory(row), CONFORMANCE_CONFIG)


@pytest.mark.contract("I2", cell=True)
@pytest.mark.parametrize(("row", "flag"), PAIRS, ids=named)
def test_a_true_flag_is_executed_and_a_false_one_refused(row: Row, flag: str) -> None:
    scenario = SCENARIO[EXECUTED[flag] if getattr(row.expected, flag) else f"without_{flag}"]
    # The row says what is asked, scores too.
    laboratory(row.name).run(Scenario(scenario.name, scenario.run))


def test_what_no_engine_reports_has_its_reason() -> None:
    for row in ROWS:
        assert not row.expected.sparse_attention
    assert set(FLAGS) == {*EXECUTED, "sparse_attention"}


def test_a_memory_without_rows_is_compared_by_its_whole_state() -> None:
    """Its witness is refused, so the scenarios above saw books alone."""
    row = next(r for r in ROWS if r.of == "mamba")
    backend = open_row(row)
    backend.prefill(list(range(3, 15)), 0)
    saved = backend.snapshot()
    for call in (lambda: backend.evict(2, 4), lambda: backend.shift(2, 4, 1), lambda: backend.score([3], 12)):
        with pytest.raises(UnsupportedOperation):
            call()
    assert backend.snapshot() == saved
    backend.close()


def test_the_page_has_this_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text(encoding="utf-8")
    assert table() in page, "docs/backends.md is behind the table; write it with: make docs"
