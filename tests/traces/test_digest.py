"""Same run, same logical digest: whatever the process, the key, the batches, the clock or the run's name."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.logs import KEY, TickClock, event, record_script, run_row, script, session_row, write_log

TESTS = Path(__file__).parents[1]


def digest(path: Path) -> str:
    with open_log(path) as log:
        return log.logical_digest()


def test_two_processes_with_other_hash_seeds_give_one_digest(tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.duckdb" for seed in (1, 2)]
    for seed, path in enumerate(paths, 1):
        subprocess.run(
            [sys.executable, "-m", "support.recording_process", str(path), "script"],
            cwd=TESTS, env=os.environ | {"PYTHONHASHSEED": str(seed)}, check=True, timeout=120,
        )  # fmt: skip
    assert digest(paths[0]) == digest(paths[1]) == digest(write_log(tmp_path / "here.duckdb"))
    with open_log(paths[0]) as one, open_log(paths[1]) as two:
        assert one.chain_digest == two.chain_digest  # the clock and the key were the same, too


def test_names_times_batches_and_keys_do_not_count(tmp_path: Path) -> None:
    made = script(run_id="other")
    with Recorder(tmp_path / "a.duckdb", run_row("other", started_at_ns=99), clock=TickClock(), batch_events=1) as rec:
        rec.open_session(session_row(run_id="other", engine_version="2"))
        for e in made.events:
            later = replace(e, at_ns=e.at_ns + 1000, elapsed_ns=5, kv_bytes=7)
            rec.record(later, tokens=made.tokens[e.seq].tokens if e.seq in made.tokens else None)
    assert digest(tmp_path / "a.duckdb") == digest(write_log(tmp_path / "b.duckdb", seal=False))


@pytest.mark.parametrize("change", [{"n_ctx_asked": 128}, {"policy": "class:budget=8"}, {"content": False}], ids=str)
def test_a_session_that_was_set_up_otherwise_has_another_digest(tmp_path: Path, change: dict) -> None:
    digests = []
    for i, row in enumerate((session_row(), session_row(**change))):
        with Recorder(tmp_path / f"{i}.duckdb", run_row(), clock=TickClock(), key=KEY) as rec:
            rec.open_session(row)
            rec.record(event(0))
        digests.append(digest(tmp_path / f"{i}.duckdb"))
    assert digests[0] != digests[1]


def test_one_other_token_gives_another_digest(tmp_path: Path) -> None:
    other = script()
    row = other.tokens[1]
    other.tokens[1] = replace(row, tokens=(*row.tokens[:-1], 96))
    assert digest(write_log(tmp_path / "a.duckdb")) != digest(write_log(tmp_path / "b.duckdb", [other]))


def test_the_order_in_which_sessions_are_interleaved_does_not_count(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.duckdb", run_row(), clock=TickClock(), key=KEY) as rec:
        for made in (script("s1"), script("s0")):
            record_script(rec, made)
    assert digest(tmp_path / "a.duckdb") == digest(write_log(tmp_path / "b.duckdb", [script("s0"), script("s1")]))
