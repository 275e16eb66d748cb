"""A recording that outgrows the memory it may take: the rest goes beside the log, and nothing is missing in the end."""

from __future__ import annotations

import random
from pathlib import Path

from kvtape.planner.events import Op
from kvtape.traces.recorder import Recorder
from kvtape.traces.spill import limit_memory, spill_path
from kvtape.traces.verify import verify
from support.logs import KEY, TickClock, event, run_row, session_row

LIMIT_MIB = 16
EVENTS, TEXT_BYTES = 6_000, 4_000


def _memory(recorder: Recorder) -> tuple[int, int]:
    """MiB in memory and in the folder beside."""
    told = "SELECT sum(memory_usage_bytes), sum(temporary_storage_bytes) FROM duckdb_memory()"
    held, spilled = recorder._writer.connection.cursor().execute(told).fetchall()[0]
    return held >> 20, spilled >> 20


def test_what_has_no_room_in_memory_goes_beside_the_log_until_it_is_sealed(tmp_path: Path) -> None:
    log, draw = tmp_path / "log.duckdb", random.Random(1)
    recorder = Recorder(log, run_row(), clock=TickClock(), key=KEY)
    limit_memory(recorder._writer.connection, f"{LIMIT_MIB}MiB")
    recorder.open_session(session_row())
    for seq in range(EVENTS):
        recorder.record(event(seq, Op.PROMPT, start=0, n_tokens=1, reason=draw.randbytes(TEXT_BYTES // 2).hex()))
        if seq % 100 == 99:
            recorder.flush()
            assert _memory(recorder)[0] <= LIMIT_MIB
    assert _memory(recorder)[1] > 0
    assert list(spill_path(log).iterdir())
    recorder.seal()
    told = verify(log)
    assert told.ok
    assert told.rows == EVENTS + 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["log.duckdb", "log.duckdb.head.json"]


def test_a_recorder_has_a_limit(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log.duckdb", run_row(), clock=TickClock(), key=KEY) as recorder:
        told = recorder._writer.connection.cursor().execute("SELECT current_setting('memory_limit')").fetchall()
    assert told == [("256.0 MiB",)]


def test_what_a_dead_recorder_left_there_is_named_and_no_part_of_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log.duckdb"
    with Recorder(log, run_row(), clock=TickClock(), key=KEY) as recorder:
        recorder.open_session(session_row())
    spill_path(log).mkdir()
    (spill_path(log) / "rows").write_bytes(b"x")
    told = verify(log)
    assert told.ok
    assert "log.duckdb.tmp" in (told.notice or "")
