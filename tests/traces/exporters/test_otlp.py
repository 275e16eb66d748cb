"""OTLP spans: the protocol's own messages read them, with whole lineage, no content, and the same bytes each time."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from kvtape.planner.events import Event, Op, Way
from kvtape.traces.errors import TraceError
from kvtape.traces.exporters.exporting import export_log
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.command import kvtape, kvtape_process
from support.imports import imported
from support.logs import KEY, TickClock, event, run_row, script, session_row, write_log
from support.otlp_messages import TracesData

REQUESTS = "".join(
    json.dumps({"timestamp": t, "input_length": n, "output_length": o, "hash_ids": [t, *range((n - 1) // 512)]}) + "\n"
    for t, n, o in [(1, 600, 5), (2000, 700, 6)]
)


def lines_of(log: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    with open_log(log) as tape:
        result = export_log(tape, "otlp", out, **options)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert result.rows == len(list(spans(found)))
    return found


def spans(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for line in lines:
        for resource in line["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                yield from scope["spans"]


def told(of: dict[str, Any]) -> dict[str, Any]:
    """Attributes as plain values."""

    def plain(value: dict[str, Any]) -> Any:
        ((kind, found),) = value.items()
        if kind == "arrayValue":
            return [plain(v) for v in found["values"]]
        return int(found) if kind == "intValue" else found

    return {a["key"]: plain(a["value"]) for a in of.get("attributes", [])}


def parsed(line: dict[str, Any]) -> Any:
    """By the protocol's messages. Their JSON mapping has bytes in base64; OTLP's has ids in hex."""

    def ids(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: _base64(v) if k.endswith(("traceId", "panId")) else ids(v) for k, v in value.items()}
        return [ids(v) for v in value] if isinstance(value, list) else value

    return json_format.ParseDict(ids(line), TracesData())


def _base64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode()


def evicting() -> list[Event]:
    """Two turns, one with an evict and a shift, one that is fatal."""
    return [
        event(0, Op.OPEN, n_tokens=64),
        event(1, Op.PROMPT, turn=1, start=0, n_tokens=10),
        event(
            2,
            Op.PREFILL,
            turn=1,
            start=0,
            stop=10,
            n_tokens=10,
            elapsed_ns=50,
            prompt_tokens=10,
            reused=0,
            prefilled=10,
        ),
        event(3, Op.EVICT, turn=1, start=2, stop=4, n_tokens=2, way=Way.REBASED, cold=False, reason="plan:budget"),
        event(4, Op.SHIFT, turn=1, start=4, stop=10, delta=-2, n_tokens=6),
        event(5, Op.GENERATE, turn=1, n_tokens=3, reason="greedy:end_tokens"),
        event(6, Op.DECODE, turn=1, start=10, stop=13, n_tokens=3, elapsed_ns=70, completion_tokens=3),
        event(7, Op.PROMPT, turn=2, start=10, n_tokens=12),
        event(
            8, Op.PREFILL, turn=2, start=13, stop=15, n_tokens=2, prompt_tokens=12, reused=8, forgotten=2, prefilled=2
        ),
        event(9, Op.GENERATE, turn=2, n_tokens=9, reason="greedy:end_tokens"),
        event(10, Op.DECODE, turn=2, start=15, stop=16, n_tokens=1, completion_tokens=1),
        event(11, Op.FATAL, turn=2, error_class="decode_failed", reason="secret words of somebody"),
    ]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = tmp_path_factory.mktemp("otlp") / "log.duckdb"
    with Recorder(log, run_row(), clock=TickClock(), key=KEY) as recorder:
        recorder.open_session(session_row())
        for made in evicting():
            recorder.record(made)
        recorder.seal()
    return log


def test_the_protocols_own_messages_read_every_line(recording: Path, tmp_path: Path) -> None:
    many = write_log(tmp_path / "many.duckdb", [script(), script("s1")])
    for number, log in enumerate((recording, many)):
        lines = lines_of(log, tmp_path / f"{number}.json")
        for line in lines:
            data = parsed(line)
            found = [s for r in data.resource_spans for scope in r.scope_spans for s in scope.spans]
            assert len({s.span_id for s in found}) == len(found) > 1
            assert {len(s.trace_id) for s in found} == {16}
            assert {len(s.span_id) for s in found} == {8}
            by_id = {s.span_id: s for s in found}
            for s in found:
                assert s.start_time_unix_nano <= s.end_time_unix_nano
                parent = by_id.get(s.parent_span_id)
                assert (parent is None) == (s is found[0])
                if parent is not None:
                    assert parent.start_time_unix_nano <= s.start_time_unix_nano
                    assert s.end_time_unix_nano <= parent.end_time_unix_nano
        assert len({s["traceId"] for s in spans(lines)}) == len(lines)


def test_a_turn_says_what_was_asked_cached_and_made(recording: Path, tmp_path: Path) -> None:
    (line,) = lines_of(recording, tmp_path / "out.json")
    found = list(spans([line]))
    assert [s["name"].split()[0] for s in found] == [
        "session", "text_completion", "prefill", "decode", "text_completion", "prefill", "decode",
    ]  # fmt: skip
    first, second = (told(s) for s in found if "gen_ai.usage.input_tokens" in told(s))
    usage = ("input_tokens", "cache_read.input_tokens", "output_tokens")
    assert [first[f"gen_ai.usage.{n}"] for n in usage] == [10, 0, 3]
    assert [second[f"gen_ai.usage.{n}"] for n in usage] == [12, 8, 1]
    assert second["kvtape.usage.forgotten_tokens"] == 2
    assert (first["gen_ai.response.finish_reasons"], second["gen_ai.response.finish_reasons"]) == (
        ["length"],
        ["error"],
    )
    assert first["gen_ai.conversation.id"] == "s0"
    assert [(e["name"], told(e)["kvtape.tokens"]) for e in found[1]["events"]] == [
        ("kvtape.evict", 2),
        ("kvtape.shift", 6),
    ]
    assert told(found[1]["events"][0])["kvtape.reason"] == "plan:budget"
    assert int(found[2]["endTimeUnixNano"]) - int(found[2]["startTimeUnixNano"]) == 50
    resource = told(line["resourceSpans"][0]["resource"])
    assert (resource["service.name"], resource["kvtape.engine"]) == ("kvtape", session_row().backend)


def test_fatal_is_an_error_of_its_turn_and_session_without_its_words(recording: Path, tmp_path: Path) -> None:
    found = list(spans(lines_of(recording, tmp_path / "out.json")))
    wrong = [s["name"].split()[0] for s in found if s.get("status", {}).get("code") == 2]
    assert wrong == ["session", "text_completion"]
    assert told(found[4])["error.type"] == told(found[4]["events"][-1])["error.type"] == "decode_failed"
    assert "secret" not in (tmp_path / "out.json").read_text()


def test_a_generation_that_ended_early_was_stopped(tmp_path: Path) -> None:
    log = tmp_path / "log.duckdb"
    with Recorder(log, run_row(), clock=TickClock(), key=KEY) as recorder:
        recorder.open_session(session_row())
        for made in evicting()[:6]:
            recorder.record(made)
        recorder.record(event(6, Op.DECODE, turn=1, start=10, stop=12, n_tokens=2, completion_tokens=2))
        recorder.seal()
    turn = next(s for s in spans(lines_of(log, tmp_path / "out")) if s["name"].startswith("text_completion"))
    assert told(turn)["gen_ai.response.finish_reasons"] == ["stop"]


def test_the_same_bytes_each_time_and_ids_that_do_not_depend_on_the_time(recording: Path, tmp_path: Path) -> None:
    plain = lines_of(recording, tmp_path / "a")
    lines_of(recording, tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    moved = lines_of(recording, tmp_path / "c", begin_ns=10**18)
    assert [s["spanId"] for s in spans(moved)] == [s["spanId"] for s in spans(plain)]
    assert next(spans(moved))["startTimeUnixNano"] == str(10**18)
    with open_log(recording) as tape, pytest.raises(TraceError, match="no run 'none'; the log has r0"):
        export_log(tape, "otlp", tmp_path / "d", "none")
    assert not (tmp_path / "d").exists()


def test_requests_come_back(tmp_path: Path) -> None:
    with imported(tmp_path, REQUESTS) as tape:
        export_log(tape, "otlp", tmp_path / "spans.json")
        at = tape.default_run().started_at_ns
    assert f'"startTimeUnixNano":"{at}"' in (tmp_path / "spans.json").read_text()
    back = tmp_path / "back.duckdb"
    assert import_trace([tmp_path / "spans.json"], back, kvtape_version="0").format == "otel"
    with open_log(back) as tape:
        query = "SELECT session_id, prompt_tokens, completion_tokens FROM turns ORDER BY session_id"
        assert tape.sql(query)[1] == [("line-0000001", 600, 5), ("line-0000002", 700, 6)]


def test_a_folder_is_written_run_by_run_on_one_clock(tmp_path: Path) -> None:
    folder = tmp_path / "tapes"
    folder.mkdir()
    for number, at in enumerate((5, 9)):
        with Recorder(folder, run_row(f"r{number}"), clock=TickClock(), key=KEY) as recorder:
            recorder.open_session(session_row(run_id=f"r{number}"))
            recorder.record(event(0, Op.OPEN, run_id=f"r{number}", at_ns=at))
            recorder.seal()
    found = list(spans(lines_of(folder, tmp_path / "out", begin_ns=1000)))
    assert [s["startTimeUnixNano"] for s in found] == ["1000", "1004"]
    assert len({s["traceId"] for s in found}) == 2
    assert len(lines_of(folder, tmp_path / "one", run_id="r1")) == 1


def test_from_the_command_line(recording: Path, tmp_path: Path) -> None:
    piped = kvtape_process(["export", recording, "--format", "otlp", "--out", "-", "--begin", "2026-01-02T03:04:05Z"])
    assert piped.code == 0, piped.err
    assert json.loads(piped.out)["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["startTimeUnixNano"].startswith(
        "17673"
    )
    done = kvtape("export", recording, "--format", "otlp", "--out", tmp_path / "o.json", "--json")
    assert json.loads(done.out)["rows"] == 7
    wrong = kvtape("export", recording, "--format", "jsonl", "--out", tmp_path / "o.jsonl", "--begin", "2026-01-02")
    assert (wrong.code, "a time to begin at is for otlp" in wrong.err) == (2, True)
    odd = kvtape("export", recording, "--format", "otlp", "--out", tmp_path / "o2.json", "--begin", "yesterday")
    assert (odd.code, odd.err.strip().endswith("write it like 2026-11-30T10:00:00Z")) == (2, True)
