"""What servers and simulators write: Dynamo, Tair, LLMServingSim, OpenTelemetry spans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.imports import column, imported, public_trace, read, refused

OVER_I63 = 2**63 + 5


def ended(
    received: float, n: int = 16, hashes: list[Any] | None = None, event: str = "request_end", **more: Any
) -> str:
    replay = {
        "trace_block_size": 16,
        "input_length": n,
        "input_sequence_hashes": [OVER_I63] if hashes is None else hashes,
    }
    request = {"request_id": "r", "request_received_ms": received, "output_tokens": 4, "replay": replay, **more}
    row = {"schema": "dynamo.request.trace.v1", "event_type": event, "event_time_unix_ms": 1}
    return json.dumps({**row, "agent_context": {"session_id": "s"}, "request": request}) + "\n"


def test_dynamo_orders_by_arrival_not_by_end(tmp_path: Path) -> None:
    data = ended(2000, ttft_ms=100, total_time_ms=200.5, cached_tokens=3, input_tokens=16) + ended(1000)
    found = read(tmp_path, data + ended(500, event="tool_end"))
    assert found.format == "dynamo"
    assert [r.at_ns for r in found.records] == [10**9, 2 * 10**9]
    late = found.records[1]
    assert (late.first_token_ns, late.elapsed_ns, late.reused, late.session) == (10**8, 200_500_000, 3, "s")
    assert (list(late.hashes), late.block_tokens) == ([OVER_I63], 16)
    assert found.kinds == ["other_events"]
    assert read(tmp_path, ended(1, n=64)).kinds == ["block_count"]


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (ended(1, hashes=[1.5]), "request.replay.input_sequence_hashes[0]"),
        (ended(1, hashes=[2**64]), "request.replay.input_sequence_hashes[0]"),
        (ended(1, cached_tokens=17), "request.cached_tokens"),
        (ended(1).replace("trace.v1", "trace.v2"), "schema"),
        (ended(1).replace('"request_received_ms": 1, ', ""), "request.request_received_ms"),
        (ended(1).replace('"trace_block_size": 16', '"trace_block_size": 0'), "request.replay.trace_block_size"),
        (ended(1).replace('"event_type"', '"schema": "x", "event_type"'), "schema"),
    ],
)
def test_dynamo_refuses(tmp_path: Path, row: str, field: str) -> None:
    assert refused(tmp_path, row, format_name="dynamo").field == field


def test_token_ids_are_hashed_under_the_key_and_kept_only_when_asked(tmp_path: Path) -> None:
    row = {"input_toks": 40, "output_toks": 2, "arrival_time_ns": 46926808}
    row |= {"input_tok_ids": list(range(40)), "output_tok_ids": [7, 8]}
    data = json.dumps(row) + "\n" + json.dumps({**row, "arrival_time_ns": 46926809}) + "\n"
    with imported(tmp_path, data) as log:
        hashes = [json.loads(h) for h in column(log, "SELECT hashes FROM tokens ORDER BY session_id, seq")]
        assert [len(h) for h in hashes] == [2, 1, 2, 1]
        assert hashes[:2] == hashes[2:]
        assert hashes[0][1] != hashes[1][0]
        assert column(log, "SELECT DISTINCT block_tokens FROM tokens") == [32]
        assert column(log, "SELECT count(*) FROM tokens WHERE tokens IS NOT NULL") == [0]
        assert column(log, "SELECT warm_tokens FROM warm_cold ORDER BY session_id") == [0, 40]
    with imported(tmp_path, data, "with_content", content=True) as log:
        assert column(log, "SELECT tokens FROM tokens ORDER BY session_id, seq")[:2] == [list(range(40)), [7, 8]]
        assert column(log, "SELECT DISTINCT content FROM sessions") == [True]


def test_output_ids_that_repeat_the_prompt_are_noted(tmp_path: Path) -> None:
    row = {"input_toks": 4, "output_toks": 4, "arrival_time_ns": 0}
    row |= {"input_tok_ids": [1, 2, 3, 4], "output_tok_ids": [1, 2, 3, 9]}
    found = read(tmp_path, json.dumps(row))
    assert (found.kinds, found.records[0].detail) == (["output_repeats_prompt"], {"repeats_prompt": 3})


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"input_toks": 3}, "input_tok_ids"),
        ({"output_tok_ids": [1, 2**31]}, "output_tok_ids[1]"),
        ({"output_tok_ids": [1, -1]}, "output_tok_ids[1]"),
        ({"arrival_time_ns": None}, "arrival_time_ns"),
    ],
)
def test_llmservingsim_refuses(tmp_path: Path, change: dict[str, Any], field: str) -> None:
    row = {"input_toks": 2, "output_toks": 2, "arrival_time_ns": 0, "input_tok_ids": [1, 2], "output_tok_ids": [3, 4]}
    assert refused(tmp_path, json.dumps({**row, **change})).field == field


def test_tair_counts_the_stamp_not_its_text(tmp_path: Path) -> None:
    row = {"ts_str": "2024-01-01 12:00:05.123456", "timestamp": 1704081605.123456, "token_ids": [30594, 303]}
    found = read(tmp_path, json.dumps(row))
    assert (found.format, found.records[0].at_ns) == ("tair", 1_704_081_605_123_456_000)
    assert (found.records[0].output_tokens, found.kinds) == (None, ["stamp_differs"])
    assert refused(tmp_path, json.dumps({**row, "token_ids": [1.0]})).field == "token_ids[0]"
    same = {**row, "ts_str": "2024-01-01 04:00:05.123456"}
    assert read(tmp_path, json.dumps(same)).kinds == []


ATTRIBUTES = {
    "gen_ai.operation.name": "chat",
    "gen_ai.conversation.id": "c1",
    "gen_ai.request.model": "m",
    "gen_ai.response.model": "m-2",
    "gen_ai.response.finish_reasons": ["stop"],
    "gen_ai.response.time_to_first_chunk": 0.25,
    "gen_ai.usage.input_tokens": 100,
    "gen_ai.usage.output_tokens": 7,
    "gen_ai.usage.cache_read.input_tokens": 60,
    "gen_ai.usage.cache_creation.input_tokens": 30,
}


def flat(began: Any = 10**18, **attributes: Any) -> dict[str, Any]:
    return {"name": "chat m", "startTimeUnixNano": began, "attributes": {**ATTRIBUTES, **attributes}}


def otlp(*spans: dict[str, Any]) -> dict[str, Any]:
    def value(v: Any) -> dict[str, Any]:
        if isinstance(v, list):
            return {"arrayValue": {"values": [value(x) for x in v]}}
        if isinstance(v, int):
            return {"intValue": str(v)}
        return {"doubleValue": v} if isinstance(v, float) else {"stringValue": v}

    made = []
    for span in spans:
        listed = [{"key": k, "value": value(v)} for k, v in span["attributes"].items()]
        made.append({**span, "startTimeUnixNano": str(span["startTimeUnixNano"]), "attributes": listed})
    return {"resourceSpans": [{"scopeSpans": [{"spans": made}]}]}


def test_spans_in_every_form_are_one_request(tmp_path: Path) -> None:
    span = {**flat(), "endTimeUnixNano": 10**18 + 5 * 10**9}
    iso = {"name": "x", "start_time": "2001-09-09T01:46:40Z", "end_time": "2001-09-09T01:46:45Z"}
    iso["attributes"] = ATTRIBUTES  # type: ignore[assignment]
    forms = [
        json.dumps(span),
        json.dumps([span]),
        json.dumps(otlp(span)),
        json.dumps(otlp(span), indent=1),
        json.dumps(iso),
    ]
    for form in forms:
        found = read(tmp_path, form)
        (request,) = found.records
        assert (found.format, found.kinds) == ("otel", [])
        assert (request.at_ns, request.elapsed_ns, request.first_token_ns) == (10**18, 5 * 10**9, 250_000_000)
        assert (request.input_tokens, request.reused, request.output_tokens) == (100, 60, 7)
        assert (request.session, request.model, request.stop) == ("c1", "m-2", "stop")
        assert request.detail["cache_creation_tokens"] == 30


def test_cached_tokens_are_part_of_the_input(tmp_path: Path) -> None:
    with imported(tmp_path, json.dumps(flat())) as log:
        assert log.sql("SELECT prefix_tokens, reused, prefilled FROM turns")[1] == [(100, 60, 40)]
    error = refused(tmp_path, json.dumps(flat(**{"gen_ai.usage.cache_read.input_tokens": 101})))
    assert error.field == "attributes.gen_ai.usage.cache_read.input_tokens"


def test_other_spans_are_counted_and_repeated_usage_folded(tmp_path: Path) -> None:
    tool = {"name": "tool", "startTimeUnixNano": 1, "attributes": {"gen_ai.operation.name": "execute_tool"}}
    lines = [flat(), flat(10**18 + 1), tool, flat(10**18 + 2, **{"gen_ai.usage.output_tokens": 8}), flat(10**18 + 3)]
    found = read(tmp_path, "".join(json.dumps(v) + "\n" for v in lines))
    assert (len(found.records), found.folded) == (3, 1)
    assert sorted(found.kinds) == ["other_spans", "repeated_usage"]
    alone = read(
        tmp_path, "".join(json.dumps(flat(10**18 + i, **{"gen_ai.conversation.id": None})) + "\n" for i in (1, 2))
    )
    assert (len(alone.records), len(set(alone.sessions))) == (2, 2)


@pytest.mark.parametrize(
    ("span", "field"),
    [
        (flat(**{"gen_ai.usage.input_tokens": 1.5}), "attributes.gen_ai.usage.input_tokens"),
        (flat(**{"gen_ai.usage.output_tokens": -1}), "attributes.gen_ai.usage.output_tokens"),
        (flat(began=None), "startTimeUnixNano"),
        (flat(began="noon"), "startTimeUnixNano"),
        ({**flat(), "endTimeUnixNano": 1}, "endTimeUnixNano"),
    ],
)
def test_otel_refuses(tmp_path: Path, span: dict[str, Any], field: str) -> None:
    assert refused(tmp_path, json.dumps(span)).field == field


def test_an_otlp_attribute_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    value = otlp(flat())
    span = value["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    span["attributes"].append(span["attributes"][0])
    assert "there twice" in str(refused(tmp_path, json.dumps(value)))


def test_the_public_server_files(tmp_path: Path) -> None:
    dynamo = read(tmp_path, [public_trace("dynamo/request_trace_v1.shape.jsonl")])
    assert ([r.at_ns // 10**6 for r in dynamo.records], dynamo.kinds) == (
        [1000, 11000, 1_000_000],
        ["block_count", "other_events"],
    )
    tair = read(tmp_path, [public_trace("tair-kvcache/tokenids_example_trace.jsonl")])
    assert (len(tair.records), tair.kinds) == (5, ["stamp_differs"])
    sim = read(tmp_path, [public_trace("llmservingsim/example_trace.jsonl")])
    assert (len(sim.records), sim.kinds) == (10, ["output_repeats_prompt"])
