"""Log folders: several recorders at once, read, verified, merged and written out as one log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtape.traces.errors import (
    KeyMismatch,
    LogExists,
    LogMissing,
    LogUnreadable,
    NotALog,
    SequenceConflict,
    SqlRejected,
)
from kvtape.traces.findings import FindingKind as Kind
from kvtape.traces.folder import MANIFEST, new_segment, segments
from kvtape.traces.merge import merge, merge_to_parquet
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.sidecar import head_path
from kvtape.traces.verify import verify
from support.logs import KEY, TickClock, record_script, run_row, script, write_log

TESTS = Path(__file__).parents[1]
N_RECORDERS = 8


def record(folder: Path, session: str, *, run: str = "r0", seal: bool = True, key: bytes = KEY) -> Path:
    recorder = Recorder(folder, run_row(run), clock=TickClock(), key=key, max_latency_s=0)
    record_script(recorder, script(session, run))
    recorder.seal() if seal else recorder.close()
    return recorder.path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sealed segments and one that a recorder left; one run in two of them."""
    made = tmp_path / "logs"
    made.mkdir()
    record(made, "a")
    record(made, "b", seal=False)
    record(made, "c", run="r1")
    return made


def events_of(path: Path | str) -> dict[tuple[str, str], list[object]]:
    with open_log(path) as log:
        return {
            (run.run_id, s.session_id): log.events(run.run_id, s.session_id)
            for run in log.runs()
            for s in log.sessions(run.run_id)
        }


EXPECTED = {("r0", "a"): script("a").events, ("r0", "b"): script("b").events, ("r1", "c"): script("c", "r1").events}


def test_a_folder_reads_as_one_log(folder: Path) -> None:
    assert events_of(folder) == EXPECTED
    with open_log(folder) as log:
        assert [r.run_id for r in log.runs()] == ["r0", "r1"], "a run of two recorders is one run"
        assert log.default_run().run_id == "r1"
        assert "1 of 3 segments" in (log.notice or "")
        assert log.sql("SELECT count(*) FROM turns")[1] == [(6,)] or log.sql("SELECT count(*) FROM residency")[1]
        assert log.state_at("r0", "b").tape_length > 0
        for forbidden in ("CREATE TABLE mine (a INTEGER)", "SELECT * FROM read_text('/etc/hostname')"):
            with pytest.raises(SqlRejected):
                log.sql(forbidden)
    result = verify(folder)
    assert result.ok, result.findings


def test_a_folder_has_the_logical_digest_of_one_log_with_the_same_sessions(folder: Path, tmp_path: Path) -> None:
    one = write_log(tmp_path / "one.duckdb", [script("a"), script("b")])
    with open_log(folder) as many, open_log(one) as single:
        assert many.logical_digest("r0") == single.logical_digest("r0")
        assert many.chain_digest != single.chain_digest


def test_merging_gives_one_sealed_log_that_verifies(folder: Path, tmp_path: Path) -> None:
    report = merge([folder], tmp_path / "merged.duckdb")
    assert events_of(tmp_path / "merged.duckdb") == EXPECTED
    assert (report.events, report.sessions) == (sum(map(len, EXPECTED.values())), 3)
    result = verify(tmp_path / "merged.duckdb")
    assert result.ok, result.findings
    assert result.chain_digest == report.digest
    with open_log(tmp_path / "merged.duckdb") as merged, open_log(folder) as parts:
        assert merged.sealed
        assert json.loads(merged.meta["merged_from"])
        assert [r.run_id for r in merged.runs()] == ["r0", "r1"]
        for run in ("r0", "r1"):
            assert merged.logical_digest(run) == parts.logical_digest(run)
    assert merge([folder], tmp_path / "again.duckdb").digest == report.digest
    with pytest.raises(LogExists):
        merge([folder], tmp_path / "merged.duckdb")


def test_parquet_files_read_as_the_log_they_came_from(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "parquet"
    report = merge_to_parquet([folder], out)
    place = f"parquet://{out}"
    assert events_of(place) == EXPECTED == events_of(Path(place))
    assert [p.name for p in sorted((out / "events").glob("*/*"))] == ["session=a", "session=b", "session=c"]
    result = verify(place)
    assert result.ok, result.findings
    assert result.chain_digest == report.digest
    with open_log(place) as log, open_log(folder) as parts:
        assert log.logical_digest("r0") == parts.logical_digest("r0")
        assert log.sql("SELECT count(*) FROM residency")[1] == parts.sql("SELECT count(*) FROM residency")[1]
        for forbidden in (f"SELECT * FROM read_text('{tmp_path}/x')", f"COPY events TO '{out}/new.parquet'"):
            with pytest.raises(SqlRejected):
                log.sql(forbidden)
    file = next((out / "events").glob("*/session=b/*.parquet"))
    file.unlink()
    assert not verify(place).ok
    with pytest.raises(LogExists):
        merge_to_parquet([folder], out)


def test_a_glob_names_several_logs_written_out(tmp_path: Path) -> None:
    for name in ("x", "y"):
        write_log(tmp_path / f"{name}.duckdb", [script(name)])
        merge_to_parquet([tmp_path / f"{name}.duckdb"], tmp_path / f"{name}-parquet")
    place = f"parquet://{tmp_path}/*-parquet"
    assert events_of(place) == {("r0", n): script(n).events for n in ("x", "y")}
    assert verify(place).ok
    with pytest.raises(LogMissing, match=r"meta\.parquet"):
        open_log(f"parquet://{tmp_path}/none*")


def test_a_segment_that_is_gone_is_missed(folder: Path, tmp_path: Path) -> None:
    gone = segments(folder)[1].path
    gone.rename(tmp_path / "elsewhere.duckdb")
    with pytest.raises(LogUnreadable, match=f"{gone.name} in the manifest and not there"):
        open_log(folder)
    assert [f.kind for f in verify(folder).findings] == [Kind.SEGMENT_MISSING]


def test_a_segment_that_was_exchanged_is_seen(folder: Path, tmp_path: Path) -> None:
    first = segments(folder)[0].path
    other = write_log(tmp_path / "other.duckdb", [script("z")])
    first.write_bytes(other.read_bytes())
    head_path(first).write_bytes(head_path(other).read_bytes())
    assert [f.kind for f in verify(folder).findings] == [Kind.SEGMENT_FOREIGN]


def test_a_torn_segment_makes_the_folder_torn(folder: Path) -> None:
    live = segments(folder)[1].path
    live.with_name(live.name + ".wal").unlink()
    with pytest.raises(LogUnreadable, match="acknowledged tail"):
        open_log(folder)
    found = verify(folder).findings
    assert [(f.kind, f.detail.split(":")[0]) for f in found] == [(Kind.LOST_TAIL, live.name)]


def test_a_line_of_the_manifest_that_a_crash_cut_costs_nothing(folder: Path) -> None:
    manifest = folder / MANIFEST
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-20])
    record(folder, "d", run="r2")
    assert [s.registered for s in segments(folder)] == [True] * 4
    assert ("r2", "d") in events_of(folder)
    assert verify(folder).ok
    manifest.write_bytes(b"".join(whole.splitlines(keepends=True)[1:]))
    assert "not in the manifest" in (verify(folder).notice or "")
    assert len(events_of(folder)) == 4


def test_what_does_not_go_together_is_refused(folder: Path, tmp_path: Path) -> None:
    twice = write_log(tmp_path / "twice.duckdb", [script("a")])
    with pytest.raises(SequenceConflict, match="session a of run r0 is in 2 parts"):
        merge([folder, twice], tmp_path / "out.duckdb")
    other = tmp_path / "other.duckdb"
    with Recorder(other, run_row(config='{"a": 1}'), clock=TickClock(), key=KEY) as recorder:
        record_script(recorder, script("e"))
    with pytest.raises(SequenceConflict, match="run r0 has another row"):
        merge([folder, other], tmp_path / "out.duckdb")
    (tmp_path / "keyed").mkdir()
    keyed = record(tmp_path / "keyed", "f", run="r7", key=bytes(32))
    with pytest.raises(KeyMismatch, match="2 keys"):
        merge([folder, keyed], tmp_path / "out.duckdb")
    assert not (tmp_path / "out.duckdb").exists()
    with pytest.raises(NotALog, match="without a manifest"):
        open_log(tmp_path)
    with pytest.raises(NotALog, match="neither empty nor a log folder"):
        new_segment(tmp_path)


def test_eight_recorders_at_once_lose_nothing_and_keep_their_order(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    command = [sys.executable, "-m", "support.recording_process", str(folder), "segment"]
    children = [
        subprocess.Popen([*command, str(n)], cwd=TESTS, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for n in range(N_RECORDERS)
    ]
    try:
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == "half\n"
        half = events_of(folder)
        assert verify(folder).ok, "while all of them record"
        merge([folder], tmp_path / "half.duckdb")
        for child in children:
            assert child.stdin is not None
            child.stdin.write("\n")
            child.stdin.flush()
        assert [child.wait(timeout=120) for child in children] == [0] * N_RECORDERS
    finally:
        for child in children:
            child.kill()
            child.communicate()
    whole = events_of(folder)
    assert len(whole) == N_RECORDERS
    for (run, session), events in whole.items():
        expected = script(session, run).events
        assert events == expected
        assert half[run, session] == expected[: len(half[run, session])]
        assert len(half[run, session]) >= len(expected) // 2
    result = verify(folder)
    assert result.ok, result.findings
    assert all(s.registered and s.sealed_digest for s in segments(folder))
    assert {p.name for p in folder.iterdir() if p.suffix == ".key"} == {"kvtape.key"}
