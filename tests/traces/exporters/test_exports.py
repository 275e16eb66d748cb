"""Exports: exact round trips, blocks of another size, accesses with the next one, the timeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.traces.errors import LogExists, TraceError
from kvtape.traces.exporters.blocks import Reblocker
from kvtape.traces.exporters.exporting import FORMATS, export_log, format_names
from kvtape.traces.exporters.requests import PromptRequest
from kvtape.traces.exporters.traces import ACCESS, oracle_general
from kvtape.traces.importers.errors import SourceRejected
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.reader import open_log
from kvtape.traces.schema import FORMAT, SCHEMA_VERSION
from kvtape.traces.verify import verify
from support.imports import imported, public_trace, read, written
from support.logs import script, write_log

ROWS = "".join(
    json.dumps({"timestamp": t, "input_length": n, "output_length": o, "hash_ids": ids}) + "\n"
    for t, n, o, ids in [(0, 600, 5, [7, 2**63]), (0, 512, 0, [7]), (27000, 1025, 9, [7, 2**53 + 1, 3])]
)


def exported(log: Path, format_name: str, out: Path) -> bytes:
    with open_log(log) as tape:
        export_log(tape, format_name, out)
    return out.read_bytes()


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trace")
    with imported(folder, ROWS):
        return folder / "sample.duckdb"


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("recording") / "log.duckdb", [script(), script("s1")])


@pytest.mark.parametrize("source", ["trace", "recording"])
def test_lines_import_back_to_the_same_log(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    log = request.getfixturevalue(source)
    lines = tmp_path / "log.jsonl"
    exported(log, "jsonl", lines)
    back = tmp_path / "back.duckdb"
    result = import_trace([lines], back, kvtape_version="0")
    assert (result.format, result.duplicates) == ("kvtape-jsonl", 0)
    assert verify(back).ok
    with open_log(log) as a, open_log(back) as b:
        assert (a.chain_digest, a.logical_digest(), a.meta) == (b.chain_digest, b.logical_digest(), b.meta)
        for table in ("runs", "sessions", "events", "tokens", "blocks", "plans", "scores", "trials"):
            assert a.arrow(table).equals(b.arrow(table)), table
    again = tmp_path / "again.jsonl"
    assert exported(back, "jsonl", again) == lines.read_bytes()
    triggers = duckdb.connect(str(back), read_only=True).execute("SELECT count(*) FROM duckdb_triggers()").fetchall()
    assert triggers[0][0] > 0


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda s: s.replace('"n_tokens":600', '"n_tokens":601', 1), "another digest"),
        (lambda s: "".join(s.splitlines(keepends=True)[:3] + s.splitlines(keepends=True)[4:]), "another digest"),
        (lambda s: "".join(s.splitlines(keepends=True)[:-1]), "no digest behind"),
        (lambda s: s.replace('"op":"prompt"', '"opp":"prompt"', 1), "no column of events"),
        (lambda s: s.replace('"table":"events"', '"table":"event"', 1), "no table"),
        (lambda s: s.replace('"n_tokens":600', '"n_tokens":6e99', 1), "cannot hold"),
        (lambda s: s.replace(f'"schema_version":"{SCHEMA_VERSION}"', '"schema_version":"99"', 1), "99"),
        (lambda s: s[:-20], "not JSON"),
    ],
)
def test_edited_lines_are_refused(trace: Path, tmp_path: Path, edit: Any, words: str) -> None:
    text = exported(trace, "jsonl", tmp_path / "log.jsonl").decode()
    changed = edit(text)
    assert changed != text
    with pytest.raises(SourceRejected, match=words):
        import_trace([written(tmp_path, changed, "bad.jsonl")], tmp_path / "bad.duckdb", kvtape_version="0")
    assert not list(tmp_path.glob("bad.duckdb*"))


@pytest.mark.parametrize("name", ["log_id", "key_id", "kvtape_version"])
@pytest.mark.parametrize("value", [None, 7])
def test_a_first_line_without_what_every_log_has_is_refused(tmp_path: Path, name: str, value: int | None) -> None:
    meta: dict[str, Any] = {"format": FORMAT, "schema_version": str(SCHEMA_VERSION), "log_id": "1", "key_id": "2"}
    meta |= {"kvtape_version": "0", name: value}
    line = json.dumps(
        {"table": "meta", "meta": {k: v for k, v in meta.items() if v is not None}}, separators=(",", ":")
    )
    with pytest.raises(SourceRejected, match=rf"bad.jsonl, line 1, meta.{name}: is missing or no text; export"):
        import_trace([written(tmp_path, line, "bad.jsonl")], tmp_path / "bad.duckdb", kvtape_version="0")
    assert [p.name for p in tmp_path.iterdir()] == ["bad.jsonl"]


def test_mooncake_comes_back_byte_for_byte(trace: Path, tmp_path: Path) -> None:
    assert exported(trace, "mooncake", tmp_path / "out").decode() == ROWS


def test_bailian_keeps_its_lineage(tmp_path: Path) -> None:
    rows = [
        {"chat_id": 5, "parent_chat_id": -1, "timestamp": 0, "input_length": 33, "output_length": 1},
        {"chat_id": 9, "parent_chat_id": 5, "timestamp": 61.114, "input_length": 48, "output_length": 2},
    ]
    for row, turn in zip(rows, (1, 2), strict=True):
        row |= {"type": "search", "turn": turn, "hash_ids": [1, 2, 2**63 + turn]}
    data = "".join(json.dumps(row) + "\n" for row in rows)
    with imported(tmp_path, data):
        pass
    assert exported(tmp_path / "sample.duckdb", "bailian", tmp_path / "out").decode() == data


def test_a_recording_becomes_a_trace_of_its_prompts(tmp_path: Path) -> None:
    """Two sessions with one beginning share its blocks; what they generated lies behind their prompts."""
    from kvtape.planner.events import Op
    from kvtape.traces.recorder import Recorder
    from support.logs import KEY, TickClock, event, run_row, session_row

    recorder = Recorder(tmp_path / "log.duckdb", run_row(), clock=TickClock(), key=KEY)
    for number, session in enumerate(("a", "b")):
        recorder.open_session(session_row(session))
        prompt = [*range(600), *[number] * 40]
        steps: list[tuple[Op, int, dict[str, Any], list[int] | None]] = [
            (Op.OPEN, 0, {"n_tokens": 2048}, None),
            (Op.PROMPT, 1, {"start": 0, "n_tokens": 640}, None),
            (Op.PREFILL, 1, {"start": 0, "stop": 500, "cache_start": 0}, prompt[:500]),
            (Op.PREFILL, 1, {"start": 500, "stop": 640, "cache_start": 500}, prompt[500:]),
            (Op.DECODE, 1, {"start": 640, "stop": 643, "cache_start": 640, "completion_tokens": 3}, [1, 2, 3]),
            (Op.PROMPT, 2, {"start": 643, "n_tokens": 700}, None),
            (Op.PREFILL, 2, {"start": 643, "stop": 700, "cache_start": 643}, list(range(57))),
        ]
        for seq, (op, turn, columns, tokens) in enumerate(steps):
            recorder.record(event(seq, op, session, turn=turn, **columns), tokens=tokens)
    recorder.close()
    found = [json.loads(line) for line in exported(tmp_path / "log.duckdb", "mooncake", tmp_path / "out").splitlines()]
    assert [(r["input_length"], r["output_length"]) for r in found] == [(640, 3), (640, 3), (700, None), (700, None)]
    first, second, third, fourth = (r["hash_ids"] for r in found)
    assert first[0] == second[0] == third[0] == fourth[0]
    assert len({first[1], second[1], third[1], fourth[1]}) == 4


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), min_size=2, max_size=4),
    st.integers(0, 15),
    st.sampled_from([(16, 64), (64, 16), (16, 16), (512, 16)]),
)
def test_blocks_of_another_size_are_shared_where_the_tokens_are(
    prompts: list[list[int]], cut: int, sizes: tuple[int, int]
) -> None:
    """Ids are chained here, as they are in traces: block i of two prompts is one only when all before it are."""
    old, new = sizes
    made = Reblocker(new)
    chains, lengths, ids = [], [], []
    for prompt in prompts:
        chain = [hash(tuple(prompt[: i + 1])) % 2**60 for i in range(len(prompt))]
        n = len(prompt) * old - min(cut, old - 1)
        chains.append(chain)
        lengths.append(n)
        ids.append(made.ids(chain, n, old))
        assert len(ids[-1]) == -(-n // new)
    for a in range(len(prompts)):
        for b in range(a):
            shared = next((i for i, (x, y) in enumerate(zip(chains[a], chains[b], strict=False)) if x != y), None)
            same = min(len(chains[a]), len(chains[b])) if shared is None else shared
            tokens = (
                min(same * old, lengths[a], lengths[b])
                if lengths[a] != lengths[b] or shared is not None
                else lengths[a]
            )
            whole = tokens // new
            assert ids[a][:whole] == ids[b][:whole]
            if whole + 1 < min(len(ids[a]), len(ids[b])) and (whole + 1) * new > same * old:
                assert ids[a][whole] != ids[b][whole]


def test_a_block_that_is_not_listed_is_nobody_elses() -> None:
    made = Reblocker(64)
    assert made.ids([5], 100, 64)[1] != made.ids([5], 100, 64)[1]
    with pytest.raises(TraceError, match="blocks of 48"):
        made.ids([1], 48, 48)


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), max_size=12))
def test_each_access_knows_the_next_one(prompts: list[list[int]]) -> None:
    requests = [
        PromptRequest("s", 1, i, i * 10**9, 16 * len(ids), 0, tuple(ids), 16, {}) for i, ids in enumerate(prompts)
    ]
    found = list(ACCESS.iter_unpack(oracle_general(requests)))
    blocks = [h for ids in prompts for h in ids]
    assert ACCESS.size == 24
    assert [f[1] for f in found] == blocks
    assert [f[0] for f in found] == [i for i, ids in enumerate(prompts) for _ in ids]
    for i, (_, block, size, following) in enumerate(found):
        assert size == 1
        assert following == next((j for j in range(i + 1, len(blocks)) if blocks[j] == block), -1)


def test_oracle_general_counts_accesses(trace: Path, tmp_path: Path) -> None:
    data = exported(trace, "oraclegeneral", tmp_path / "out")
    kind = np.dtype([("time", "<u4"), ("block", "<u8"), ("size", "<u4"), ("next", "<i8")])
    rows = np.frombuffer(data, kind)
    assert rows["block"].tolist() == [7, 2**63, 7, 7, 2**53 + 1, 3]
    assert rows["next"].tolist() == [2, -1, 3, -1, -1, -1]
    assert rows["time"].tolist() == [0, 0, 0, 27, 27, 27]


def test_the_timeline_has_tracks_slices_counters_and_flows(tmp_path: Path) -> None:
    from kvtape.planner.events import Op
    from kvtape.traces.recorder import Recorder
    from support.logs import KEY, TickClock, event, run_row, session_row

    recorder = Recorder(tmp_path / "log.duckdb", run_row(), clock=TickClock(), key=KEY)
    recorder.open_session(session_row("a"))
    fill = {"start": 0, "stop": 8, "cache_start": 0, "elapsed_ns": 2500, "resident_tokens": 8}
    recorder.record(event(0, Op.OPEN, "a", n_tokens=64))
    recorder.record(event(1, Op.PREFILL, "a", at_ns=1000, **fill), tokens=range(8))
    recorder.record(event(2, Op.PLAN, "a", at_ns=4000, reason="budget"))
    gone = {"start": 2, "stop": 4, "way": "gap", "cold": False, "resident_tokens": 6}
    recorder.record(event(3, Op.EVICT, "a", at_ns=5000, reason="plan:budget", **gone))
    recorder.close()
    events = json.loads(exported(tmp_path / "log.duckdb", "perfetto", tmp_path / "out"))["traceEvents"]
    by_phase: dict[str, list[Any]] = {}
    for e in events:
        by_phase.setdefault(e["ph"], []).append(e)
    assert [e["args"]["name"] for e in by_phase["M"]] == ["kvtape run r0", "a (llama)"]
    (slice_,) = by_phase["X"]
    assert (slice_["name"], slice_["ts"], slice_["dur"], slice_["args"]["stop"]) == ("prefill", 1.0, 2.5, 8)
    assert [e["name"] for e in by_phase["i"]] == ["open", "plan", "evict"]
    assert [(e["ts"], e["args"]) for e in by_phase["C"]] == [
        (3.5, {"resident": 8, "cold": 0}),
        (5.0, {"resident": 6, "cold": 0}),
    ]
    assert [(e["ts"], e["id"]) for e in by_phase["s"]] == [(4.0, "1.3")]
    assert [(e["ts"], e["id"], e["bp"]) for e in by_phase["f"]] == [(5.0, "1.3", "e")]


def test_parquet_is_read_by_anybody_and_by_kvtape(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with open_log(trace) as tape:
        result = export_log(tape, "parquet", out)
        rows = tape.sql("SELECT count(*) FROM events")[1][0][0]
        digest = tape.logical_digest()
    assert result.rows == rows + 1 + 3 + 3
    plain = duckdb.connect()
    hive = f"read_parquet('{out}/events/*/*/*.parquet', hive_partitioning = true)"
    assert plain.execute(f"SELECT count(*), count(DISTINCT session) FROM {hive}").fetchall() == [(rows, 3)]
    with open_log(f"parquet://{out}") as back:
        assert back.logical_digest() == digest


def test_the_day_of_an_imported_session_is_that_of_its_source(tmp_path: Path) -> None:
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 23:59:59,374,44\n2023-11-17 00:00:01,1,1\n"
    with imported(tmp_path, azure) as log:
        export_log(log, "parquet", tmp_path / "out")
    days = sorted(p.name for p in (tmp_path / "out" / "events").iterdir())
    assert days == ["day=2023-11-16", "day=2023-11-17"]


def test_nothing_is_written_over_and_a_failure_leaves_nothing(trace: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("mine")
    with open_log(trace) as tape:
        for format_name in format_names():
            with pytest.raises(LogExists):
                export_log(tape, format_name, taken)
        with pytest.raises(TraceError, match="choose one of parquet, jsonl"):
            export_log(tape, "csv", tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]
    assert taken.read_text() == "mine"


def test_what_has_no_blocks_says_so(tmp_path: Path) -> None:
    azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"
    with imported(tmp_path, azure) as log:
        for format_name, words in (("mooncake", "no block ids"), ("oraclegeneral", "no block ids")):
            with pytest.raises(TraceError, match=words):
                export_log(log, format_name, tmp_path / "out")
        export_log(log, "bailian", tmp_path / "out")
    assert json.loads((tmp_path / "out").read_text())["hash_ids"] == []
    assert set(FORMATS) < set(format_names())


def test_the_public_mooncake_trace_comes_back(tmp_path: Path) -> None:
    source = public_trace("mooncake/conversation_trace.jsonl")
    with imported(tmp_path, [source]):
        pass
    assert exported(tmp_path / "sample.duckdb", "mooncake", tmp_path / "out") == source.read_bytes()
    assert read(tmp_path, [tmp_path / "out"], format_name="mooncake").duplicates == 1
