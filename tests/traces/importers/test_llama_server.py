"""llama-server logs: one fact in all its wordings, slots that fold, and what a low log level hides."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.events import Event
from kvtape.planner.residency import fold
from kvtape.traces.importers.events import EventMaker
from kvtape.traces.importers.llama_lines import kind_of
from support.imports import imported, public_trace, read

SLOT = "slot update_slots: id  0 | task 7 | "


def events_of(found: Any) -> dict[str, list[Event]]:
    maker = EventMaker("r", found.format, 0, bytes(32), content=False)
    for record, session in zip(found.records, found.sessions, strict=True):
        maker.add(record, session)
    list(maker.closing())
    out: dict[str, list[Event]] = {}
    for row in maker.events:
        out.setdefault(row["session_id"], []).append(Event(run_id="r", **row))
    return out


def story(found: Any, session: str = "slot-0") -> list[tuple[Any, ...]]:
    return [(str(e.op), e.start, e.stop) for e in events_of(found)[session][1:-1]]


def log(*lines: str) -> str:
    return "\n".join(lines) + "\n"


B3999 = log(
    "slot launch_slot_: id  0 | task 7 | processing task",
    SLOT + "new prompt, n_ctx_slot = 64, n_keep = 0, n_prompt_tokens = 20",
    SLOT + "kv cache rm [0, end)",
    SLOT + "prompt processing progress, n_past = 20, n_tokens = 20, progress = 1.000000",
    SLOT + "prompt done, n_past = 20, n_tokens = 20",
    "slot      release: id  0 | task 7 | stop processing: n_past = 29, truncated = 0",
    "slot print_timing: id  0 | task 7 | ",
    "prompt eval time =    12.50 ms /    20 tokens (    0.62 ms per token,  1600.00 tokens per second)",
    "       eval time =    40.00 ms /    10 tokens (    4.00 ms per token,   250.00 tokens per second)",
    "srv  update_slots: all slots are idle",
)
B6800 = B3999.replace("kv cache rm [0, end)", "n_past = 0, memory_seq_rm [0, end)")
B6970 = (
    B3999.replace("n_prompt_tokens = 20", "task.n_tokens = 20")
    .replace("kv cache rm [0, end)", "n_tokens = 0, memory_seq_rm [0, end)")
    .replace("progress, n_past = 20, n_tokens = 20", "progress, n_tokens = 20, batch.n_tokens = 20")
    .replace("prompt done, n_past = 20, n_tokens = 20", "prompt done, n_tokens = 20, batch.n_tokens = 20")
    .replace("n_past = 29", "n_tokens = 29")
)
B9409 = "".join(
    f"0.0{i}.000.00{i} T {line}\n" if i not in (7, 8) else line + "\n"
    for i, line in enumerate(
        B6970.replace("n_tokens = 0, memory_seq_rm", "cached n_tokens = 0, memory_seq_rm").splitlines()
    )
)
CONTAINER = "".join(f"llama-1  | {line}\n" for line in B3999.splitlines())
FIELDS = "id_slot=0 id_task=7"
KEY_VALUE = log(
    f"INFO [   launch_slot_with_data] slot is processing task | timestamp=1719000000 {FIELDS}",
    f"INFO [            update_slots] kv cache rm [p0, end) | timestamp=1719000001 {FIELDS} p0=0",
    f"INFO [           print_timings] prompt eval time =  12.50 ms /  20 tokens | timestamp=1719000002 {FIELDS}",
    f"INFO [           print_timings] generation eval time =  40.00 ms /  10 runs | timestamp=1719000002 {FIELDS}",
    f"INFO [            update_slots] slot released | timestamp=1719000003 {FIELDS} n_ctx=64 n_past=29 truncated=false",
)


def as_json(line: str) -> str:
    """The same line as the JSON log format has it."""
    text, _, fields = line.partition("] ")[2].partition(" | ")
    pairs = dict(f.split("=") for f in fields.split())
    numbers = {k: int(v) for k, v in pairs.items() if v.isdigit()}
    return json.dumps({"tid": "1", "level": "INFO", "msg": text, **numbers})


@pytest.mark.parametrize(
    "text", [B3999, B6800, B6970, B9409, CONTAINER], ids=["b3999", "b6800", "b6970", "b9409", "container"]
)
def test_all_wordings_are_one_story(tmp_path: Path, text: str) -> None:
    found = read(tmp_path, text)
    assert found.format == "llama-server"
    assert story(found) == [("prompt", 0, None), ("prefill", 0, 20), ("generate", None, None), ("decode", 20, 29)]
    events = events_of(found)["slot-0"]
    assert (events[0].n_tokens, events[1].reused, events[1].prefilled) == (64, 0, 20)
    assert (events[3].completion_tokens, events[3].elapsed_ns) == (10, 40_000_000)
    assert fold(events).resident_tokens == 29


def test_stamps_since_the_start(tmp_path: Path) -> None:
    assert [r.at_ns for r in read(tmp_path, B9409).records][1] == 1_000_001_000
    assert "no_times" in read(tmp_path, B3999).kinds
    stamped = "".join(f"2025-07-01T12:00:00.{i}Z {line}\n" for i, line in enumerate(B3999.splitlines()))
    assert read(tmp_path, stamped).records[1].at_ns - read(tmp_path, stamped).records[0].at_ns == 0
    assert read(tmp_path, stamped).records[0].at_ns == 1_751_371_200_100_000_000


@pytest.mark.parametrize("form", [str, as_json])
def test_key_value_and_json_lines(tmp_path: Path, form: Any) -> None:
    found = read(tmp_path, log(*map(form, KEY_VALUE.splitlines())))
    assert story(found) == [("prompt", 0, None), ("prefill", 0, 20), ("generate", None, None), ("decode", 20, 29)]
    assert [r.at_ns // 10**9 for r in found.records] == [1_719_000_003] * 5
    events = events_of(found)["slot-0"]
    assert (events[1].reused, events[1].n_tokens, events[3].completion_tokens) == (0, 20, 10)


def test_an_identical_prompt_computes_one_token(tmp_path: Path) -> None:
    again = B3999.replace("kv cache rm [0, end)", "kv cache rm [19, end)").replace(
        SLOT + "kv",
        SLOT
        + "need to evaluate at least 1 token for each active slot, n_past = 20, n_prompt_tokens = 20\n"
        + SLOT
        + "kv",
    )
    found = read(tmp_path, B3999 + again)
    turns = [e for e in events_of(found)["slot-0"] if e.op == "prompt"]
    assert [(e.reused, e.prefilled) for e in turns] == [(0, 20), (19, 1)]
    (cut,) = [e for e in events_of(found)["slot-0"] if e.op == "truncate"]
    assert (cut.start, cut.reason) == (19, "logits")


def test_a_pruned_window_loses_the_whole_prompt(tmp_path: Path) -> None:
    """The log begins in the middle: 30 tokens were there, none of them is of use."""
    text = log(
        SLOT + "new prompt, n_ctx_slot = 64, n_keep = 0, n_prompt_tokens = 20",
        SLOT + "n_past = 20, cache_tokens.size() = 30, seq_id = 0, pos_min = 12, n_swa = 8",
        SLOT + "forcing full prompt re-processing due to lack of cache data (likely due to SWA, see x)",
        SLOT + "kv cache rm [0, end)",
        SLOT + "prompt processing progress, n_past = 20, n_tokens = 20, progress = 1.0",
    )
    events = events_of(read(tmp_path, text))["slot-0"]
    assert [(str(e.op), e.reason, e.n_tokens) for e in events[1:-1]] == [
        ("prompt", None, 20),
        ("prefill", "before_log", 30),
        ("truncate", "window_pruned", None),
        ("prefill", None, 20),
    ]
    assert events[1].reused == 0


def test_context_shift_evicts_and_moves(tmp_path: Path) -> None:
    text = B3999.replace(
        "slot      release", SLOT + "slot context shift, n_keep = 4, n_left = 60, n_discard = 30\nslot      release"
    ).replace("stop processing: n_past = 29", "stop processing: n_past = 40")
    events = events_of(read(tmp_path, text))["slot-0"]
    assert [(str(e.op), e.start, e.stop, e.delta) for e in events[4:-1]] == [
        ("decode", 20, 64, None),
        ("evict", 4, 34, None),
        ("shift", 34, 64, -30),
        ("decode", 64, 70, None),
    ]
    after = fold(events)
    assert (after.resident.as_pairs(), after.next_cache_position) == ([(0, 4), (34, 70)], 40)


def test_what_is_generated_behind_a_shift_is_no_prompt(tmp_path: Path) -> None:
    """The cache is shorter than the prompt by then."""
    text = B3999.replace("= 20", "= 60").replace("n_past = 29", "n_past = 34")
    shift = SLOT + "slot context shift, n_keep = 4, n_left = 60, n_discard = 40\nslot      release"
    found = read(tmp_path, text.replace("slot      release", shift))
    assert story(found)[-4:] == [("decode", 60, 64), ("evict", 4, 44), ("shift", 44, 64), ("decode", 64, 74)]


@pytest.mark.parametrize("discard", [0, -5, 100])
def test_a_shift_that_cannot_be_is_noted(tmp_path: Path, discard: int) -> None:
    text = B3999 + SLOT + f"slot context shift, n_keep = 4, n_left = 25, n_discard = {discard}\n"
    found = read(tmp_path, text)
    assert "contradiction" in found.kinds
    assert "evict" not in {s[0] for s in story(found)}


def test_chunk_reuse_moves_a_chunk_down(tmp_path: Path) -> None:
    text = B3999 + log(
        SLOT + "new prompt, n_ctx_slot = 64, n_keep = 0, n_prompt_tokens = 24",
        SLOT + "reusing chunk with size 9, shifting KV cache [20, 29) -> [10, 19)",
        SLOT + "kv cache rm [19, end)",
        SLOT + "prompt processing progress, n_past = 24, n_tokens = 5, progress = 1.0",
    )
    events = events_of(read(tmp_path, text))["slot-0"]
    assert [(str(e.op), e.start, e.stop, e.delta) for e in events[6:-1]] == [
        ("evict", 10, 20, None),
        ("shift", 20, 29, -10),
        ("prefill", 29, 34, None),
    ]
    assert events[5].reused == 19


CREATED = "created context checkpoint 1 of 3 (pos_min = 0, pos_max = 19, size = 9.061 MiB)"


def test_checkpoints_are_saved_restored_erased_apart(tmp_path: Path) -> None:
    text = B3999 + log(
        SLOT + CREATED,
        SLOT + "new prompt, n_ctx_slot = 64, n_keep = 0, n_prompt_tokens = 40",
        SLOT + "restored context checkpoint (pos_min = 0, pos_max = 19, size = 9.061 MiB)",
        SLOT + "erased invalidated context checkpoint (pos_min = 0, pos_max = 30, n_swa = 8, size = 9.0 MiB)",
        SLOT + "erasing old context checkpoint (pos_min = 0, pos_max = 19, size = 9.0 MiB)",
        SLOT + "failed to restore context checkpoint (pos_min = 0, pos_max = 19, size = 9.0 MiB)",
    )
    events = events_of(read(tmp_path, text))["slot-0"]
    assert [(str(e.op), e.reason) for e in events[5:-1]] == [
        ("snapshot", None),
        ("prompt", None),
        ("restore", None),
        ("plan", "checkpoint_erased"),
        ("plan", "checkpoint_evicted"),
        ("refuse", "checkpoint_not_restored"),
    ]
    fold(events)


def test_a_log_level_that_is_too_low_claims_no_evictions(tmp_path: Path) -> None:
    text = log(
        "0.01.000.000 I slot launch_slot_: id  0 | task 7 | processing task, is_child = 0",
        "0.02.000.000 I slot print_timing: id  0 | task 7 |",
        "prompt eval time =    12.50 ms /    6 tokens (    0.62 ms per token,  1600.00 tokens per second)",
        "       eval time =    40.00 ms /    10 tokens (    4.00 ms per token,   250.00 tokens per second)",
        "0.03.000.000 I slot      release: id  0 | task 7 | stop processing: n_tokens = 29, truncated = 0",
        "0.03.000.001 I srv  update_slots: all slots are idle",
    )
    with imported(tmp_path, text) as tape:
        assert [w.kind for w in tape.result.warnings] == ["level_too_low"]  # type: ignore[attr-defined]
        _, rows = tape.sql("SELECT prompt_tokens, reused, completion_tokens, evicted_tokens FROM turns")
        assert rows == [(20, 14, 10, None)]
        assert tape.sql("SELECT at_ns FROM events WHERE op IN ('prompt', 'generate')")[1] == [(0,), (2_000_000_000,)]


def test_what_happens_to_all_slots(tmp_path: Path) -> None:
    text = B3999 + log("srv  update_slots: clearing KV cache", "srv  x: purging slot 0 with 0 tokens")
    assert story(read(tmp_path, text))[-1] == ("truncate", 0, None)
    full = "srv  update_slots: failed to find free space in the KV cache, retrying with smaller batch size, i = 0"
    text = B3999.replace("slot      release", full + "\nslot      release")
    (refused,) = [e for e in events_of(read(tmp_path, text))["slot-0"] if e.op == "refuse"]
    assert (refused.reason, refused.error_class) == ("kv_full", "allocator_exhausted")


def test_a_prompt_that_is_too_long_is_refused_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    too_long = SLOT + "the request exceeds the available context size, try increasing it\n"
    found = read(tmp_path, too_long + B3999)
    events = events_of(found)["slot-0"]
    assert [str(e.op) for e in events[:4]] == ["open", "refuse", "prompt", "prefill"]
    assert (events[1].reason, events[1].error_class) == ("prompt_exceeds_context", "ContextOverflow")
    assert fold(events).resident_tokens == 29


def test_a_server_that_cannot_shift_is_marked(tmp_path: Path) -> None:
    line = "common_init_from_params: KV cache shifting is not supported for this context, disabling KV cache shifting\n"
    assert "reuse_disabled" in read(tmp_path, line + B3999).kinds


LINES = st.one_of(
    st.tuples(st.just("new prompt, n_ctx_slot = 64, n_keep = 0, n_prompt_tokens = {}"), st.integers(1, 70)),
    st.tuples(st.just("kv cache rm [{}, end)"), st.integers(0, 70)),
    st.tuples(st.just("prompt processing progress, n_past = {}, n_tokens = 1"), st.integers(0, 70)),
    st.tuples(st.just("prompt done, n_past = {}, n_tokens = 1"), st.integers(0, 70)),
    st.tuples(st.just("stop processing: n_past = {}, truncated = 0"), st.integers(0, 70)),
    st.tuples(st.just("slot context shift, n_keep = 2, n_left = 20, n_discard = {}"), st.integers(0, 30)),
    st.tuples(st.just("reusing chunk with size 4, shifting KV cache [{}, 30) -> [3, 9)"), st.integers(0, 30)),
    st.tuples(
        st.just("created context checkpoint 1 of 3 (pos_min = 0, pos_max = {}, size = 1 MiB)"), st.integers(0, 2)
    ),
    st.tuples(st.just("restored context checkpoint (pos_min = 0, pos_max = {}, size = 1 MiB)"), st.integers(0, 2)),
    st.tuples(st.just("erasing old context checkpoint (pos_min = 0, pos_max = {}, size = 1 MiB)"), st.integers(0, 2)),
    st.tuples(st.just("processing task"), st.just(0)),
    st.tuples(st.just("n_past = 2, cache_tokens.size() = {}, seq_id = 0, pos_min = 1"), st.integers(0, 70)),
)


@settings(max_examples=250, deadline=None)
@given(st.lists(LINES, min_size=1, max_size=25))
def test_whatever_a_log_says_its_events_fold(tmp_path_factory, lines) -> None:  # type: ignore[no-untyped-def]
    found = read(
        tmp_path_factory.getbasetemp(),
        log(SLOT + "prompt done", *(SLOT + text.format(n) for text, n in lines)),
        format_name="llama-server",
    )
    for events in events_of(found).values():
        fold(events)


def test_the_public_samples(tmp_path: Path) -> None:
    folder = public_trace("llama-server-logs/samples")
    found = {path.name: read(tmp_path, [path]) for path in sorted(folder.iterdir())}
    assert {f.format for f in found.values()} == {"llama-server"}
    for each in found.values():
        assert "contradiction" not in each.kinds
        for events in events_of(each).values():
            fold(events)
    two = events_of(found["2025-08_gptoss20b_two_requests.log"])["slot-0"]
    assert [(e.reused, e.prefilled) for e in two if e.op == "prompt"] == [(0, 85), (84, 1)]
    swa = events_of(found["2025-07_swa_full_reprocess.log"])["slot-0"]
    assert [(e.op, e.reason) for e in swa if e.op == "truncate"] == [("truncate", "window_pruned")]
    assert [e.reused for e in swa if e.op == "prompt"] == [0]
    pair = events_of(found["2026-04_checkpoint_pos_min_zero_bug_and_fix.log"])["slot-2"]
    assert [str(e.op) for e in pair if e.op in ("plan", "restore")] == ["plan", "restore"]
    assert '"n_past":987' in next(e.detail or "" for e in pair if e.op == "restore")


NO_EVENT = re.compile(
    r"accepted|checkpoint with|alora|ga_i|prompt cache|cache-ram|idle slot|context checkpoints (en|dis)abled|"
    r"n_past was set|failed to truncate|speculative|since last checkpoint|main/do_checkpoint|trying to reuse|"
    r"after context reuse|decode token|shift: \[|context shift$|\bprompt %p|prompt state size|load prompt from cache|"
    r"default port"
)
"""Wordings of the history that no event comes from: settings, attempts, what another line says again."""


def test_every_wording_of_the_history_is_known() -> None:
    rows = [
        line.split("\t")
        for line in public_trace("llama-server-logs/log-format-history.tsv").read_text().splitlines()[1:]
    ]
    texts = [f"{prefix} {form}" for group, _, _, _, prefix, form in rows if group == "server"]
    assert len(texts) == 147
    unknown = [t for t in texts if kind_of(re.sub(r"%\S*?[duzx]\b|%\d*d", "7", t)) is None and not NO_EVENT.search(t)]
    assert unknown == []
