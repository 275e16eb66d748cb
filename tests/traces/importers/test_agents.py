"""Sessions of agents: AIPerf (only what is new), Weka (local ids, sub-agents), TraceLab (cache counts)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.traces.importers.aiperf import Context
from support.imports import imported, public_trace, read, refused, written


def delta(session: str, n: int, ids: list[int], **more: Any) -> str:
    return json.dumps({"session_id": session, "input_length": n, "output_length": 3, "hash_ids": ids, **more}) + "\n"


def test_later_rows_are_put_behind_what_was_there(tmp_path: Path) -> None:
    data = delta("a", 600, [1, 2], timestamp=5.5, group_id=4) + delta("b", 512, [1], timestamp=0)
    data += delta("a", 424, [7], delay=10.0) + delta("a", 100, [8], delay=2)
    found = read(tmp_path, data)
    assert found.format == "aiperf"
    assert [(s, r.at_ns, r.input_tokens) for r, s in zip(found.records, found.sessions, strict=True)] == [
        ("b", 0, 512),
        ("a", 5_500_000, 600),
        ("a", 15_500_000, 1024),
        ("a", 17_500_000, 1124),
    ]
    first, second, third = [r for r in found.records if r.session == "a"]
    assert list(first.hashes) == [1, 2]
    assert (second.hashes[0], len(second.hashes), third.hashes[:2]) == (1, 2, second.hashes)
    assert third.hashes[2] == 8
    assert [r.detail["hash_ids"] for r in (first, second, third)] == [[1, 2], [7], [8]]
    assert found.kinds == ["arrival_floor"]


@given(st.lists(st.integers(1, 1300), min_size=1, max_size=6), st.lists(st.integers(1, 1300), min_size=1, max_size=6))
def test_two_prompts_have_the_blocks_of_their_common_beginning(left: list[int], right: list[int]) -> None:
    """The model: the tokens themselves, each named by its piece and its place in it."""

    def built(lengths: list[int], salt: int) -> tuple[list[int], list[tuple[int, int]]]:
        context, tokens = Context(512), list[tuple[int, int]]()
        for i, n in enumerate(lengths):
            ids = [i * 10 + k + (salt if i else 0) for k in range(-(-n // 512))]
            context.add(ids, n)
            tokens += [(ids[t // 512], t % 512) for t in range(n)]
        assert context.n_tokens == len(tokens)
        return context.hashes(), tokens

    (a, tokens_a), (b, tokens_b) = built(left, 0), built([left[0], *right], 1000)
    for k, (x, y) in enumerate(zip(a, b, strict=False)):
        assert (x == y) == (tokens_a[k * 512 : k * 512 + 512] == tokens_b[k * 512 : k * 512 + 512])


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (delta("a", 600, [1, 2], delay=1), "timestamp"),
        (delta("a", 600, [1, 2], timestamp=1) + delta("a", 1, [3]), "delay"),
        (delta("a", 600, [1], timestamp=1), "hash_ids"),
        (delta("a", 600, [1, 2], timestamp=-1), "timestamp"),
    ],
)
def test_aiperf_refuses(tmp_path: Path, data: str, field: str) -> None:
    assert refused(tmp_path, data).field == field


def test_the_public_aiperf_excerpt(tmp_path: Path) -> None:
    found = read(tmp_path, [public_trace("aiperf/inference-day-2026.excerpt26.jsonl")])
    assert (len(found.records), len(set(found.sessions))) == (26, 3)
    longest = max(found.records, key=lambda r: r.input_tokens)
    assert longest.input_tokens > 80_000
    assert len(longest.hashes) == -(-longest.input_tokens // 512)


def asked(t: float, n: int, ids: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "model": "m", "in": n, "out": 5, "hash_ids": ids, "stop": "end_turn", **more}


def conversation(name: str = "trace_1", **more: Any) -> str:
    agent = {"t": 10.0, "type": "subagent", "agent_id": "agent_001", "total_tokens": None, "duration_ms": None}
    agent["requests"] = [asked(0.5, 64, [1]), asked(2.0, 100, [4], out=0)]
    requests = [asked(0.0, 150, [1, 2], api_time=2.5, think_time=1.5), agent, asked(20.0, 63, [], stop="")]
    head = {"id": name, "block_size": 64, "hash_id_scope": "local", "requests": requests, "totals": None}
    return json.dumps({**head, **more})


def test_a_sub_agent_is_a_session_of_its_own_and_counts_from_its_marker(tmp_path: Path) -> None:
    found = read(tmp_path, conversation())
    assert found.format == "weka"
    assert [(s, r.at_ns / 1e9, r.input_tokens) for r, s in zip(found.records, found.sessions, strict=True)] == [
        ("trace_1", 0.0, 150),
        ("trace_1/agent_001", 10.5, 64),
        ("trace_1/agent_001", 12.0, 100),
        ("trace_1", 20.0, 63),
    ]
    first, second, _, last = found.records
    assert (first.elapsed_ns, first.stop, first.detail["think_time"]) == (2_500_000_000, "end_turn", 1.5)
    assert second.hashes[0] == first.hashes[0]
    assert (last.hashes, last.stop) == ([], None)
    assert found.kinds == ["zero_output"]


def test_ids_of_two_files_are_not_the_same_block(tmp_path: Path) -> None:
    files = [written(tmp_path, conversation(f"trace_{i}"), f"{i}.json") for i in (1, 2)]
    found = read(tmp_path, files)
    assert {r.hashes[0] for r in found.records if r.hashes and r.session == "trace_1"}.isdisjoint(
        {r.hashes[0] for r in found.records if r.hashes and r.session == "trace_2"}
    )
    everywhere = read(tmp_path, conversation(hash_id_scope="global")).records[0]
    assert everywhere.hashes == [1, 2]


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"requests": [asked(0, 128, [1])]}, "requests[0].hash_ids"),
        ({"requests": [asked(0, 64, [1.0])]}, "requests[0].hash_ids[0]"),
        ({"requests": [asked(0, 64, [2**64])]}, "requests[0].hash_ids[0]"),
        ({"requests": [{**asked(0, 64, [1]), "in": None}]}, "requests[0].in"),
        ({"requests": [{**asked(0, 64, [1]), "t": None}]}, "requests[0].t"),
        ({"requests": [7]}, "requests[0]"),
        ({"requests": 7}, "requests"),
        ({"block_size": "64"}, "block_size"),
        ({"requests": [{"t": 1, "type": "subagent", "requests": [asked(-1, 64, [1])]}]}, "requests[0].requests[0].t"),
    ],
)
def test_weka_refuses(tmp_path: Path, more: dict[str, Any], field: str) -> None:
    assert refused(tmp_path, conversation(**more)).field == field


def test_the_public_weka_files(tmp_path: Path) -> None:
    folder = public_trace("weka-kv-cache-tester")
    found = read(tmp_path, sorted(folder.glob("trace_*.json")))
    assert len(found.records) == 96
    assert len([s for s in set(found.sessions) if "/" in s]) == 10
    assert all(len(r.hashes) == r.input_tokens // 64 for r in found.records)


def round_(number: int, total: int, prefix: int | None, second: int, **more: Any) -> str:
    events = [
        {"timestamp": f"2026-06-01T05:40:{second:02d}.151Z"},
        {"timestamp": f"2026-06-01T05:40:{second + 2:02d}.151Z"},
    ]
    row = {"session_id": "s", "round_index": number, "model": "m", "input_tokens_total": total, "prefix_tokens": prefix}
    return (
        json.dumps({**row, "output_tokens": 9, "timing_events": events, "reasoning_output_tokens": None, **more}) + "\n"
    )


def test_cached_counts_are_measured_reuse_and_may_fall(tmp_path: Path) -> None:
    data = round_(0, 9324, 6912, 1) + round_(1, 10058, 9856, 5) + round_(2, 10152, 3456, 9) + round_(3, 10200, None, 20)
    with imported(tmp_path, data) as log:
        assert log.sql("SELECT prefix_tokens, reused, prefilled FROM turns ORDER BY turn")[1] == [
            (9324, 6912, 2412),
            (10058, 9856, 202),
            (10152, 3456, 6696),
            (10200, None, None),
        ]
        assert log.sql("SELECT kind, warm_tokens FROM warm_cold ORDER BY turn")[1][3] == (None, None)
        detail = log.sql("SELECT detail FROM events WHERE op = 'prompt' LIMIT 1")[1][0][0]
        assert "reasoning" not in detail
        assert [w.kind for w in log.result.warnings] == ["prefix_lost"]  # type: ignore[attr-defined]


def test_repeated_usage_is_folded_and_its_rows_are_named(tmp_path: Path) -> None:
    """One row for each content block of a turn, back to back, with the same four counts."""
    data = round_(0, 100, 50, 1) + round_(0, 100, 50, 2) + round_(0, 100, 50, 3) + round_(1, 120, 100, 4)
    data += round_(2, 100, 50, 5)
    found = read(tmp_path, data)
    assert sum(r.reused for r in found.records) == 200
    assert (len(found.records), found.folded, found.kinds) == (3, 2, ["repeated_usage", "prefix_lost"])
    repeats = found.records[0].detail["repeats"]
    assert [line for line, _ in repeats] == [2, 3]
    other = round_(0, 100, 50, 1) + round_(0, 100, 50, 2, session_id="t")
    assert read(tmp_path, other).folded == 0


@pytest.mark.parametrize(
    ("row", "field"),
    [
        (round_(0, 100, 101, 1), "prefix_tokens"),
        (round_(0, 100, 1, 1, timing_events=[]), "timing_events"),
        (round_(0, 100, 1, 1, timing_events=[{"timestamp": "noon"}]), "timing_events[0].timestamp"),
        (round_(0, 100, 1, 1, output_tokens=1.5), "output_tokens"),
    ],
)
def test_tracelab_refuses(tmp_path: Path, row: str, field: str) -> None:
    assert refused(tmp_path, row).field == field


def test_a_replay_workload_expects_a_prefix(tmp_path: Path) -> None:
    head = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms\n"
    found = read(tmp_path, head + "0,100,0,0,512,64,30\n0,100,1,576,128,64,0\n1,50,0,0,40,8,0\n")
    assert [(r.session, r.at_ns // 10**6, r.input_tokens, r.reused) for r in found.records] == [
        ("1", 50, 40, None),
        ("0", 100, 512, None),
        ("0", 130, 704, None),
    ]
    assert found.records[2].detail["expected_prefix"] == 576
    bare = read(tmp_path, head.replace("arrival_time,", "") + "0,0,0,512,64,30\n")
    assert bare.kinds == ["no_times"]


def test_the_public_tracelab_files(tmp_path: Path) -> None:
    found = read(tmp_path, [public_trace("tracelab/sanitized_round_trace.jsonl")])
    assert (len(found.records), len(set(found.sessions))) == (19, 2)
    assert "prefix_lost" in found.kinds
    for name, rows in (("example", 8), ("large", 303)):
        assert len(read(tmp_path, [public_trace(f"tracelab/replay_multi_session_{name}.csv")]).records) == rows
