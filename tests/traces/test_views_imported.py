"""The views over imported requests: what is not known is NULL, and what a sparse prefill could have saved."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.events import Op
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.imports import imported
from support.logs import KEY, TickClock, event, run_row, session_row


def row(stamp: int, n: int, ids: list[int]) -> str:
    return f'{{"timestamp": {stamp}, "input_length": {n}, "output_length": 1, "hash_ids": {ids}}}\n'


def test_effects_that_no_source_told_are_null(tmp_path: Path) -> None:
    with imported(tmp_path, row(0, 600, [7, 8])) as log:
        names = "evicted_tokens, admitted_tokens, recomputed_tokens, physical_prefill_tokens, prefill_ns, reused"
        assert log.sql(f"SELECT {names} FROM turns")[1] == [(None,) * 6]


@settings(max_examples=4, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 2000), st.lists(st.integers(0, 2), min_size=4, max_size=4)), min_size=1, max_size=9
    )
)
def test_warm_is_what_an_endless_cache_would_have_had(tmp_path_factory, requests) -> None:  # type: ignore[no-untyped-def]
    """Against a set of the blocks that were seen."""
    seen: set[int] = set()
    wanted = []
    for n, ids in requests:
        blocks = ids[: -(-n // 512)]
        warm = next((i for i, b in enumerate(blocks) if b not in seen), len(blocks))
        seen.update(blocks)
        tokens = min(n, warm * 512)
        wanted.append((n, tokens, n - tokens, sum(range(tokens + 1, n + 1)), "warm" if tokens else "cold"))
    data = "".join(row(0, n, ids[: -(-n // 512)]) for n, ids in requests)
    with imported(tmp_path_factory.mktemp("warm"), data) as log:
        names = "context_tokens, warm_tokens, computed_tokens, attention_pairs, kind"
        assert log.sql(f"SELECT {names} FROM warm_cold ORDER BY session_id")[1] == wanted
        columns = "at_least_tokens, turns, context_tokens, attention_pairs"
        assert log.sql(f"SELECT {columns} FROM context_lengths ORDER BY 1")[1] == [
            (low, len(part), sum(w[0] for w in part), sum(w[3] for w in part))
            for low in sorted({1 << (n.bit_length() - 1) for n, *_ in wanted})
            for part in [[w for w in wanted if low <= w[0] < 2 * low]]
        ]


def test_a_recording_counts_what_it_measured(tmp_path: Path) -> None:
    turns = {"reused": 0, "forgotten": 0, "prefilled": 10}, {"reused": 8, "forgotten": 2, "prefilled": 4}
    recorder = Recorder(tmp_path / "log.duckdb", run_row(), clock=TickClock(), key=KEY)
    recorder.open_session(session_row())
    for seq, (op, turn, columns) in enumerate(
        [
            (Op.OPEN, 0, {"n_tokens": 64}),
            (Op.PROMPT, 1, {"start": 0, "n_tokens": 10}),
            (Op.PREFILL, 1, {"start": 0, "stop": 10, "n_tokens": 10, "cache_start": 0, **turns[0]}),
            (Op.PROMPT, 2, {"start": 10, "n_tokens": 14}),
            (Op.PREFILL, 2, {"start": 10, "stop": 14, "n_tokens": 4, "cache_start": 10, **turns[1]}),
        ]
    ):
        recorder.record(
            event(seq, op, turn=turn, **columns), tokens=range(columns["n_tokens"]) if op == "prefill" else None
        )
    recorder.close()
    with open_log(tmp_path / "log.duckdb") as log:
        rows = log.sql("SELECT turn, kind, rule, warm_tokens, attention_pairs FROM warm_cold ORDER BY turn")[1]
    assert rows == [(1, "cold", "measured", 0, 55), (2, "warm", "measured", 10, 50)]


def test_a_pruned_window_is_a_reason_and_what_was_there_before_is_no_prefill(tmp_path: Path) -> None:
    slot = "slot update_slots: id  0 | task 7 | "
    text = "\n".join(
        slot + said
        for said in (
            "new prompt, n_ctx_slot = 64, n_keep = 0, n_prompt_tokens = 20",
            "n_past = 20, cache_tokens.size() = 30, seq_id = 0, pos_min = 12, n_swa = 8",
            "forcing full prompt re-processing due to lack of cache data",
            "kv cache rm [0, end)",
            "prompt processing progress, n_past = 20, n_tokens = 20, progress = 1.0",
        )
    )
    with imported(tmp_path, text) as log:
        assert log.sql("SELECT reason, tokens FROM why_prefilled")[1] == [("window_pruned", 20)]
