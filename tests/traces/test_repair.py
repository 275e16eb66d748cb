"""Repair keeps every whole batch, says exactly what it cut, and never writes the log it reads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtape.traces.errors import LogExists, LogLocked, LogUnreadable
from kvtape.traces.keys import key_path
from kvtape.traces.leftovers import claimed, dead_files, leftovers
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.repair import repair
from kvtape.traces.sidecar import head_path
from kvtape.traces.verify import verify
from support.forge import copy_log, edit_log
from support.logs import KEY, TickClock, record_script, run_row, script, write_log

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("repair") / "killed.duckdb", seal=False)


def bytes_of(log: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in log.parent.iterdir() if p.is_file()}


def wal_of(log: Path) -> Path:
    return log.with_name(log.name + ".wal")


def test_a_log_that_only_lacks_its_seal_is_sealed_whole(killed: Path, tmp_path: Path) -> None:
    before, out = bytes_of(killed), tmp_path / "out.duckdb"
    report = repair(killed, out)
    assert bytes_of(killed) == before
    assert (bool(report.cut), report.cut.text) == (False, "nothing was cut")
    assert (report.events, report.unacknowledged, report.notes) == (len(script().events), 0, ())
    result = verify(out)
    assert result.ok, result.findings
    assert result.chain_digest == report.digest
    with open_log(out) as log, open_log(killed) as old:
        assert log.sealed
        assert log.notice is None
        assert log.events("r0", "s0") == old.events("r0", "s0") == script().events
        assert log.logical_digest() == old.logical_digest()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out.duckdb", "out.duckdb.head.json"]


@pytest.mark.parametrize("damage", ["cut", "zeros", "garbage", "gone"])
def test_a_torn_tail_is_cut_and_named(killed: Path, tmp_path: Path, damage: str) -> None:
    torn = copy_log(killed, tmp_path / "torn.duckdb")
    wal = wal_of(torn)
    whole = wal.read_bytes()
    kept = {"gone": 0}.get(damage, len(whole) - 300)
    filler = {"zeros": bytes(5000), "garbage": b"\x5a" * 5000}.get(damage, b"")
    wal.write_bytes(whole[:kept] + filler)
    if damage == "gone":
        wal.unlink()
    before, out = bytes_of(torn), tmp_path / "new" / "out.duckdb"
    out.parent.mkdir()
    with pytest.raises(LogUnreadable):
        open_log(torn)
    report = repair(torn, out)
    assert bytes_of(torn) == before
    assert report.cut.batches is not None
    first, last = report.cut.batches
    assert (report.batches, last) == (first - 1, 5 if damage != "gone" else last)
    events = script().events
    lost = [e for e in events if e.seq >= report.events]
    assert report.cut.events == len(lost) > 0
    assert report.cut.sessions == {"r0/s0": (lost[0].seq, lost[-1].seq)}
    assert (report.cut.wal_bytes > 0) == (damage in ("zeros", "garbage"))
    result = verify(out)
    assert result.ok, result.findings
    assert report.cut.text in (result.notice or ""), "a repaired log goes on saying what it lacks"
    if report.events:
        with open_log(out) as log:
            assert log.events("r0", "s0") == events[: report.events]


def test_what_is_no_torn_tail_is_left_alone(killed: Path, tmp_path: Path) -> None:
    edited = edit_log(killed, tmp_path / "edited.duckdb", ["UPDATE events SET at_ns = 7 WHERE seq = 1"], rechain=False)
    with pytest.raises(LogUnreadable, match="that is no torn tail"):
        repair(edited, tmp_path / "out.duckdb")
    torn = copy_log(killed, tmp_path / "file.duckdb")
    torn.write_bytes(torn.read_bytes()[:20_000])
    with pytest.raises(LogUnreadable):
        repair(torn, tmp_path / "out.duckdb")
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("out")]


def test_without_a_head_it_says_that_nobody_can_tell(killed: Path, tmp_path: Path) -> None:
    alone = copy_log(killed, tmp_path / "alone.duckdb")
    head_path(alone).unlink()
    report = repair(alone, tmp_path / "out.duckdb")
    assert "nobody can tell" in report.notes[0]
    head_path(alone).write_text("{")
    assert "damaged" in repair(alone, tmp_path / "again.duckdb").notes[0]


def test_the_new_log_is_never_written_over_anything(killed: Path, tmp_path: Path) -> None:
    (tmp_path / "out.duckdb").write_bytes(b"mine")
    with pytest.raises(LogExists):
        repair(killed, tmp_path / "out.duckdb")
    assert (tmp_path / "out.duckdb").read_bytes() == b"mine"


def test_a_log_that_is_being_recorded_is_not_repaired(tmp_path: Path) -> None:
    path = tmp_path / "live.duckdb"
    with Recorder(path, run_row(), clock=TickClock(), key=KEY) as recorder:
        record_script(recorder, script())
        with pytest.raises(LogLocked, match="being recorded"):
            repair(path, tmp_path / "out.duckdb")
    other = tmp_path / "other.duckdb"
    command = [sys.executable, "-m", "support.recording_process", str(other), "hold"]
    child = subprocess.Popen(command, cwd=TESTS, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(LogLocked, match="being recorded"):
            repair(other, tmp_path / "out.duckdb")
    finally:
        child.kill()
        child.communicate()
    assert repair(other, tmp_path / "out.duckdb").events == 3


def dead_maker(path: Path) -> None:
    """Leave what a kill while the log is made leaves."""
    if os.fork() == 0:
        with claimed(path) as fresh:
            fresh.write_bytes(b"half a log")
            fresh.with_name(fresh.name + ".wal").write_bytes(b"")
            os._exit(9)
    os.wait()


def test_what_a_dead_maker_left_is_named_and_the_next_one_removes_it(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    dead_maker(path)
    left = leftovers(path)
    assert sorted(p.suffix for p in left) == sorted([".lock", ".wal", left[0].suffix])
    assert dead_files(tmp_path) == left
    with claimed(path) as mine:
        mine.write_bytes(b"")
        assert dead_files(tmp_path) == []
        assert leftovers(path) == [], "neither the dead one's, which are gone, nor what is in use"
        with claimed(path) as other:
            assert mine.exists()
            assert other != mine
    write_log(path)
    dead_maker(path)
    dead_maker(key_path(path))
    path.with_name("a.duckdb.sealing").write_bytes(b"half")
    result = verify(path)
    assert result.ok
    left = leftovers(path, key_path(path))
    assert len(left) == 7
    assert all(p.name in (result.notice or "") for p in left)
    assert repair(path, tmp_path / "out.duckdb").leftovers == tuple(left)
