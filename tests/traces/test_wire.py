"""Wire models: exact JSON, nothing unknown let in."""

from __future__ import annotations

import json

import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.events import BlockRef, Op
from kvtape.traces.schema import EVENTS, ROW_TABLES, TOKENS
from kvtape.traces.wire import from_json, to_json, to_wire
from support.logs import event, rows_of

any_row = st.sampled_from(ROW_TABLES).flatmap(lambda t: st.tuples(st.just(t), rows_of(t)))


@given(any_row)
def test_json_and_back_is_exact(case: tuple) -> None:
    table, row = case
    assert from_json(table.name, to_json(row)) == row


def test_sixty_four_bit_ids_keep_every_digit() -> None:
    line = to_json(event(0, block_id=2**64 - 1, delta=-(2**63)))
    assert f'"block_id":{2**64 - 1}' in line
    assert f'"delta":{-(2**63)}' in line


def test_blocks_travel_as_json_text() -> None:
    line = to_json(event(0, Op.EVICT, blocks=(BlockRef(2**63, 1, 2),)))
    assert json.loads(json.loads(line)["blocks"]) == [[2**63, 1, 2]]


@pytest.mark.parametrize(
    "change",
    [
        {"surprise": 1},
        {"seq": -1},
        {"seq": 2**64},
        {"seq": 1.0},
        {"seq": "1"},
        {"op": "explode"},
        {"cold": 1},
        {"detail": "{not json"},
        {"blocks": "[[1,2]]"},
        {"blocks": '{"a":1}'},
        {"delta": 2**63},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(change: dict) -> None:
    data = json.loads(to_json(event(0))) | change
    with pytest.raises(ValueError):  # pydantic's error is one
        from_json(EVENTS.name, json.dumps(data))


def test_a_missing_column_is_refused_unless_it_is_nullable() -> None:
    data = json.loads(to_json(event(0)))
    assert "start" not in data
    del data["turn"]
    with pytest.raises(pydantic.ValidationError, match="turn"):
        from_json(EVENTS.name, json.dumps(data))


def test_a_row_that_no_column_can_hold_is_refused_on_the_way_out() -> None:
    with pytest.raises(pydantic.ValidationError, match="start"):
        to_wire(event(0, start=2**64))


def test_token_ids_are_thirty_two_bit() -> None:
    row = {
        "run_id": "r",
        "session_id": "s",
        "seq": 0,
        "start": 0,
        "n_tokens": 1,
        "block_tokens": 32,
        "hashes": "[]",
        "tokens": [2**31],
    }
    with pytest.raises(pydantic.ValidationError, match="tokens"):
        from_json(TOKENS.name, json.dumps(row))
