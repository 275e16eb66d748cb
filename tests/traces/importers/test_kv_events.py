"""KV events: three encodings, copies, orphans, gaps, repeats, ranks, colder media."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.events import Event
from kvtape.planner.residency import ResidencyState, fold
from kvtape.traces.codec import blocks_from_text
from kvtape.traces.importers.events import EventMaker
from support.imports import column, imported, public_trace, read, refused

A, B, C = 4284880390408332321, 10213826896782787679, 18174474959339759123
"""Two of them are 2^63 and above."""


def stored(*hashes: int, parent: int | None = None, size: int = 4, first: int = 0, **more: Any) -> dict[str, Any]:
    tokens = list(range(first, first + size * len(hashes)))
    event = {"type": "BlockStored", "block_hashes": list(hashes), "parent_block_hash": parent, "token_ids": tokens}
    return {**event, "block_size": size, "lora_id": None, **more}


def removed(*hashes: int, **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), **more}


CLEARED = {"type": "AllBlocksCleared"}


def batch(*events: Any, ts: float | None = 1.5, rank: int | None = 0) -> dict[str, Any]:
    return {"ts": ts, "events": list(events), "data_parallel_rank": rank}


def lines(*batches: Any) -> str:
    return "".join(json.dumps(b) + "\n" for b in batches)


def as_array(value: dict[str, Any]) -> list[Any]:
    order = {
        "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        "BlockRemoved": ("block_hashes", "medium"),
        "AllBlocksCleared": (),
    }
    events = [[e["type"], *(e.get(name) for name in order[e["type"]])] for e in value["events"]]
    return [value["ts"], events, value["data_parallel_rank"]]


def as_bytes(value: dict[str, Any]) -> dict[str, Any]:
    def wide(h: int | None) -> bytes | None:
        return None if h is None else h.to_bytes(8) + bytes(24)

    events = []
    for event in value["events"]:
        event = dict(event)
        if "block_hashes" in event:
            event["block_hashes"] = [wide(h) for h in event["block_hashes"]]
        if "parent_block_hash" in event:
            event["parent_block_hash"] = wide(event["parent_block_hash"])
        events.append(event)
    return {**value, "events": events}


def framed(*batches: Any, sequences: list[int] | None = None) -> bytes:
    out = b""
    for i, value in zip(sequences or range(len(batches)), batches, strict=True):
        raw = msgspec.msgpack.encode(value)
        out += struct.pack(">QI", i, len(raw)) + raw
    return out


def events_of(found: Any) -> dict[str, list[Event]]:
    """The events of each session as the log would have them."""
    maker = EventMaker("r", found.format, 0, bytes(32), content=False)
    for record, session in zip(found.records, found.sessions, strict=True):
        maker.add(record, session)
    list(maker.closing())
    out: dict[str, list[Event]] = {}
    for row in maker.events:
        row = dict(row)
        if "blocks" in row:
            row["blocks"] = blocks_from_text(row["blocks"])
        out.setdefault(row["session_id"], []).append(Event(run_id="r", **row))
    return out


def folded(found: Any) -> dict[str, ResidencyState]:
    return {session: fold(events) for session, events in events_of(found).items()}


STORY = (batch(stored(A, B)), batch(stored(C, parent=B, first=8), removed(A), ts=2.0), batch(CLEARED, ts=1.0, rank=1))


def test_three_encodings_are_one_story(tmp_path: Path) -> None:
    forms = [
        framed(*map(as_array, STORY)),
        framed(*STORY),
        framed(*map(as_bytes, STORY)),
        lines(*STORY).encode(),
        lines(*({"wire": "array", "batch": as_array(b)} for b in STORY)).encode(),
    ]
    found = [read(tmp_path, form) for form in forms]
    assert {f.format for f in found} == {"kv-events"}
    first = events_of(found[0])
    assert all(events_of(f) == first for f in found)
    assert [e.op for e in first["rank-0"]] == ["open", "prefill", "prefill", "evict", "close"]
    assert [list(r.hashes) for r in found[0].records if r.hashes] == [[A, B], [C]]
    assert found[3].kinds == []


def test_ids_of_64_bits_and_times_are_exact_in_the_log(tmp_path: Path) -> None:
    data = lines(batch(stored(A, B), ts=1761816192.1347115), batch(stored(C, parent=B), ts=1761816192.2))
    with imported(tmp_path, data) as log:
        query = "SELECT ('0x' || unnest(from_json(hashes, '[\"VARCHAR\"]')))::UBIGINT FROM tokens ORDER BY seq"
        assert column(log, query) == [A, B, C]
        assert log.default_run().started_at_ns == 1_761_816_192_134_711_500
        assert column(log, "SELECT at_ns FROM events WHERE op = 'prefill'") == [0, 65_288_500]
        assert column(log, "SELECT count(*) FROM tokens WHERE tokens IS NOT NULL OR mac IS NULL") == [0]
        assert log.state_at(log.default_run().run_id, "rank-0").resident_tokens == 12


def test_content_is_stored_only_when_asked(tmp_path: Path) -> None:
    with imported(tmp_path, lines(batch(stored(A, B))), content=True) as log:
        assert column(log, "SELECT tokens FROM tokens") == [list(range(8))]


def test_a_block_is_resident_until_its_last_copy_goes(tmp_path: Path) -> None:
    """One logical hash in several physical blocks."""
    story = [batch(stored(1, 2, 3)), batch(stored(3, parent=2)), batch(removed(3))]
    left = folded(read(tmp_path, lines(*story)))["rank-0"]
    assert left.resident.as_pairs() == [(0, 8), (12, 16)]
    gone = read(tmp_path, lines(*story, batch(removed(3), removed(3))))
    assert folded(gone)["rank-0"].resident.as_pairs() == [(0, 8)]
    assert (gone.kinds, gone.records[-1].op) == (["removed_unknown"], "refuse")


def test_a_block_that_comes_back_was_computed_again(tmp_path: Path) -> None:
    found = read(tmp_path, lines(batch(stored(1, 2)), batch(removed(1)), batch(stored(1, 5, first=9))))
    events = events_of(found)["rank-0"]
    assert [(e.op, e.start, e.stop, e.cache_start, e.recomputed_tokens) for e in events[1:-1]] == [
        ("prefill", 0, 8, 0, 0),
        ("evict", 0, 4, None, None),
        ("prefill", 8, 16, 8, 4),
    ]
    assert fold(events).resident_tokens == 12


def test_an_offloaded_block_goes_cold_comes_back_and_is_trimmed(tmp_path: Path) -> None:
    cpu = {"medium": "CPU"}
    story = [stored(1, 2), stored(1, **cpu), removed(1), stored(1), removed(1), removed(1, **cpu), removed(2)]
    found = read(tmp_path, lines(batch(*story)))
    events = events_of(found)["rank-0"]
    assert [(e.op, e.cold) for e in events[1:-1]] == [
        ("prefill", None),
        ("evict", True),
        ("admit", None),
        ("evict", True),
        ("trim", None),
        ("evict", False),
    ]
    states = [fold(events[: n + 1]) for n in range(len(events))]
    assert [s.resident_tokens for s in states] == [0, 8, 4, 8, 4, 4, 0, 0]
    assert [s.cold_ranges.n_tokens for s in states] == [0, 0, 4, 0, 4, 0, 0, 0]


def test_an_unknown_parent_is_noted_until_it_comes(tmp_path: Path) -> None:
    orphan = [batch(stored(3, parent=1)), batch(stored(4, parent=3))]
    assert read(tmp_path, lines(*orphan)).kinds == ["orphan_parent"]
    assert read(tmp_path, lines(*orphan, batch(stored(1)))).kinds == []


def test_a_gap_ends_the_session_and_a_repeat_is_dropped(tmp_path: Path) -> None:
    first, second, third = batch(stored(1)), batch(stored(2)), batch(removed(1), stored(3))
    found = read(tmp_path, framed(first, second, second, third, sequences=[5, 6, 6, 9]))
    assert found.duplicates == 1
    assert [(w.kind, w.count, w.line) for w in found.warnings] == [
        ("sequence_gap", 2, 4),
        ("removed_unknown", 1, 4),
        ("duplicate_rows", 1, 3),
    ]
    sessions = events_of(found)
    assert [e.op for e in sessions["rank-0"]] == ["open", "prefill", "prefill", "lost"]
    assert [e.op for e in sessions["rank-0-part-2"]] == ["open", "refuse", "prefill", "close"]
    assert fold(sessions["rank-0"]).lost


def test_each_rank_counts_for_itself(tmp_path: Path) -> None:
    batches = [batch(stored(1)), batch(stored(1), rank=1), batch(stored(2)), batch(stored(2), rank=1)]
    found = read(tmp_path, framed(*batches, sequences=[0, 7, 1, 8]))
    assert (found.kinds, sorted(set(found.sessions))) == ([], ["rank-0", "rank-1"])


def test_an_engine_that_was_started_anew_is_another_session(tmp_path: Path) -> None:
    found = read(tmp_path, framed(batch(stored(1)), batch(stored(2)), batch(stored(3)), sequences=[0, 1, 0]))
    assert (found.kinds, found.sessions[-1]) == (["publisher_restart"], "rank-0-part-2")


def test_time_that_goes_back_is_noted_and_the_order_stays(tmp_path: Path) -> None:
    found = read(tmp_path, lines(batch(stored(1), ts=5.0), batch(stored(2), ts=4.0)))
    assert (found.kinds, [r.at_ns for r in found.records]) == (["time_back"], [5 * 10**9, 4 * 10**9])


def test_unknown_fields_are_counted_and_left_out(tmp_path: Path) -> None:
    extra = stored(1, group_idx=1, kv_cache_spec_kind="sliding_window")
    found = read(tmp_path, lines(batch(extra), [2.0, [["BlockRemoved", [1], "GPU", 7]], 0]))
    assert [(w.kind, w.count) for w in found.warnings] == [("unknown_fields", 3)]


@pytest.mark.parametrize(
    ("bad", "field", "words"),
    [
        (batch({"type": "BlockMoved"}), "events[0]", "unknown tag 'BlockMoved'"),
        ([1.0, [["BlockMoved", [1]]], 0], "events[0]", "unknown tag 'BlockMoved'"),
        (batch(removed(-1)), "events[0].block_hashes[0]", "no hash"),
        (batch(removed(2**64)), "events[0].block_hashes[0]", "no hash"),
        (batch({"type": "BlockRemoved", "block_hashes": [1.0]}), "events[0].block_hashes[0]", "no hash"),
        (batch({"type": "BlockRemoved", "block_hashes": ["abc"]}), "events[0].block_hashes[0]", "no hash"),
        (batch({"type": "BlockRemoved", "block_hashes": ["abcd"]}), "events[0].block_hashes[0]", "2 bytes"),
        (batch({"type": "BlockRemoved", "block_hashes": None}), "events[0].block_hashes", "no list"),
        (batch({**stored(1), "token_ids": [1, 2, 3]}), "events[0].token_ids", "3 tokens for 4"),
        (batch({**stored(1), "token_ids": [1, 2, 3, 2**31]}), "events[0].token_ids[3]", "no token id"),
        (batch({**stored(1), "block_size": 0}), "events[0].block_size", "no size"),
        (batch(ts=-1.0), "ts", "before 0"),
        ({"ts": "noon", "events": [], "data_parallel_rank": 0}, "ts", "no time"),
        (batch(rank=-1), "data_parallel_rank", "no rank"),
        ({"ts": 1, "events": 7}, "events", "no list"),
        ([1.0, {}], None, "no batch"),
        (7, None, "no batch"),
    ],
)
def test_a_bad_event_is_named(tmp_path: Path, bad: Any, field: str | None, words: str) -> None:
    error = refused(tmp_path, lines(batch(stored(1)), bad))
    assert (error.line, error.field, words in str(error)) == (2, field, True)


def test_two_hashes_that_agree_in_8_bytes_are_refused(tmp_path: Path) -> None:
    event = {"type": "BlockRemoved", "block_hashes": [bytes(8) + b"a", bytes(8) + b"b"]}
    assert "agree in their first 8 bytes" in str(refused(tmp_path, framed(batch(event))))


@pytest.mark.parametrize(
    ("sequences", "words"), [([3, 2], "sequence 2 after 3"), ([0, 1, 1], "sequence 1 after 1, with other content")]
)
def test_batches_out_of_order_are_refused(tmp_path: Path, sequences: list[int], words: str) -> None:
    batches = [batch(stored(i + 1)) for i in range(len(sequences))]
    error = refused(tmp_path, framed(*batches, sequences=sequences))
    assert (error.field, words in str(error)) == ("sequence", True)


@pytest.mark.parametrize(("cut", "words"), [(-1, "of"), (5, "header")])
def test_a_frame_that_is_cut_off_is_named(tmp_path: Path, cut: int, words: str) -> None:
    whole = framed(batch(stored(1)))
    data = whole + whole[:cut]
    error = refused(tmp_path, data)
    assert (error.line, words in str(error)) == (2, True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["store", "copy", "remove", "uncopy", "clear"]), st.integers(1, 5)), max_size=40)
)
def test_any_story_folds_to_what_a_counter_says(tmp_path_factory, steps) -> None:  # type: ignore[no-untyped-def]
    """The model: how many copies of each hash are resident."""
    cpu = {"medium": "CPU"}
    make = {
        "store": lambda h: stored(h),
        "copy": lambda h: stored(h, **cpu),
        "remove": lambda h: removed(h),
        "uncopy": lambda h: removed(h, **cpu),
        "clear": lambda _: CLEARED,
    }
    copies: dict[int, int] = {}
    for what, h in steps:
        if what == "clear":
            copies.clear()
        elif what in ("store", "remove"):
            copies[h] = max(0, copies.get(h, 0) + (1 if what == "store" else -1))
    data = lines(batch(stored(9)), *(batch(make[what](h)) for what, h in steps))
    found = read(tmp_path_factory.mktemp("kv"), data)
    cleared = any(what == "clear" for what, _ in steps)
    assert folded(found)["rank-0"].resident_tokens == 4 * (sum(copies.values()) + (not cleared))


@pytest.mark.parametrize("name", ["array_tagged", "map_tagged", "map_tagged_bytes_hash"])
def test_the_public_frames(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, [public_trace(f"vllm-kv-events/{name}.synthetic.bin")])
    sessions = events_of(found)
    assert {s: [str(e.op) for e in events] for s, events in sessions.items()} == {
        "rank-0": ["open", "prefill", "prefill", "evict", "lost"],
        "rank-0-part-2": ["open", "refuse", "close"],
        "rank-1": ["open", "truncate", "close"],
    }
    base = read(tmp_path, [public_trace("vllm-kv-events/array_tagged.synthetic.bin")])
    assert sessions == events_of(base)
    kinds = {w.kind: w.count for w in found.warnings if w.kind != "unknown_fields"}
    assert kinds == {"sequence_gap": 1, "removed_unknown": 1}


@pytest.mark.parametrize("name", ["base", "lora"])
def test_the_public_single_event(tmp_path: Path, name: str) -> None:
    found = read(tmp_path, [public_trace(f"vllm-kv-events/llmd_kv_event_{name}.json")])
    (step,) = found.records
    assert (len(step.hashes), max(step.hashes) > 2**63, step.columns["n_tokens"]) == (25, True, 400)
    assert step.detail.get("lora") == (None if name == "base" else "Alice")
