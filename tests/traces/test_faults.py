"""Kills, full disks and crashes between the steps of sealing: what was acknowledged is there afterwards."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtape.traces import live as live_module
from kvtape.traces import seal as seal_module
from kvtape.traces.errors import LogExists, LogWriteFailed
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.verify import verify
from support.logs import KEY, TickClock, event, record_script, run_row, script, session_row

TESTS = Path(__file__).parents[1]


def process(*args: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "support.recording_process", *map(str, args)]
    return subprocess.Popen(
        command, cwd=TESTS, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
    )


def acknowledged(lines: list[str]) -> int:
    return max((int(line.split()[1]) for line in lines if line.startswith("acked ")), default=-1)


def stored_seqs(path: Path) -> list[int]:
    with open_log(path) as log:
        return [e.seq for e in log.events("r0", "s0")]


def test_kill_minus_nine_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    for trial, after_acks in enumerate((1, 3, 6, 10)):
        path = tmp_path / f"{trial}.duckdb"
        child = process(path, "forever")
        lines: list[str] = []
        while acknowledged(lines) < 7 * after_acks - 1:
            lines.append(child.stdout.readline())
        time.sleep(0.003 * trial)  # somewhere inside a later batch
        child.kill()
        lines += child.communicate()[0].splitlines()
        acked = acknowledged(lines)
        result = verify(path)
        assert result.ok, result.findings
        seqs = stored_seqs(path)
        assert seqs == list(range(len(seqs)))
        assert len(seqs) > acked
        with Recorder(path, run_row(), clock=TickClock(), key=KEY, resume=True) as again:
            again.record(event(len(seqs)))
            again.flush()
        assert stored_seqs(path)[-1] == len(seqs)


def check_full_disk(child: subprocess.Popen[str], path: Path) -> None:
    out, err = child.communicate(timeout=120)
    assert child.returncode == 3, (out[-500:], err[-2000:])
    lines = out.splitlines()
    assert lines[-1].startswith("error LogWriteFailed: ")
    assert path.name in lines[-1]
    assert "acknowledged events are safe" in lines[-1]
    acked = acknowledged(lines)
    assert acked > 0
    result = verify(path)
    assert result.ok, result.findings
    seqs = stored_seqs(path)
    assert seqs == list(range(len(seqs)))
    assert len(seqs) > acked


def test_a_file_size_limit_ends_recording_with_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "full.duckdb"
    check_full_disk(process(path, "full", 700_000), path)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or subprocess.run([mount, "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]).returncode:
        pytest.skip("mounting a small tmpfs needs root; the file size limit above tests the same path")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_ends_recording_with_one_clear_line(small_disk: Path) -> None:
    path = small_disk / "full.duckdb"
    check_full_disk(process(path, "full"), path)


def test_a_disk_too_full_to_begin_with_is_told_at_once(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(1_900_000))
    with pytest.raises(LogWriteFailed, match=r"full\.duckdb"):
        Recorder(small_disk / "full.duckdb", run_row(), clock=TickClock(), key=KEY)


class Crash(BaseException):
    """Not an Exception, so that nothing on the way handles it."""


STEPS = ["build_file", "copy_rows", "fsync_file", "check_copy", "replace", "write_head", "unlink"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", STEPS)
def test_a_crash_at_any_step_of_sealing_leaves_a_readable_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    path = tmp_path / "a.duckdb"
    made = script()
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY)
    record_script(recorder, made)
    with open_log(path) as log:
        digest = log.logical_digest()
    left = tmp_path / "left"

    def die() -> None:
        shutil.copytree(tmp_path, left)  # the disk as a killed process leaves it
        raise Crash

    patch_step(monkeypatch, step, after, die)
    with pytest.raises(Crash):
        recorder.seal()
    monkeypatch.undo()
    crashed = left / "a.duckdb"
    with open_log(crashed) as log:
        assert log.events("r0", "s0") == made.events
        assert log.logical_digest() == digest
    assert verify(crashed).ok
    if sealed(crashed):
        assert ("left by a crash" in (verify(crashed).notice or "")) == (left / "a.duckdb.wal").exists()
        with pytest.raises(LogExists, match="sealed; a sealed log is finished"):
            Recorder(crashed, run_row(), clock=TickClock(), key=KEY, resume=True)
    else:
        with Recorder(crashed, run_row(), clock=TickClock(), key=KEY, resume=True) as again:
            again.seal()
    assert verify(crashed).ok


def sealed(path: Path) -> bool:
    with open_log(path) as log:
        return log.sealed


def patch_step(monkeypatch: pytest.MonkeyPatch, step: str, after: bool, die: Any) -> None:
    owner: Any = Path if step in ("replace", "unlink") else seal_module
    original = getattr(owner, step)

    def wrapped(*args: Any, **options: Any) -> Any:
        mine = owner is seal_module or str(args[0]).endswith((".sealing", "a.duckdb.wal"))
        exists = step != "unlink" or str(args[0]).endswith("a.duckdb.wal")
        if mine and exists and not after:
            die()
        result = original(*args, **options)
        if mine and exists:
            die()
        return result

    monkeypatch.setattr(owner, step, wrapped)


def test_a_sealing_that_cannot_be_written_leaves_the_log_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.duckdb"
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY)
    record_script(recorder, script())

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(seal_module, "fsync_file", full)
    with pytest.raises(LogWriteFailed, match=r"No space left.*every row is safe.*kvtape repair .*a\.duckdb --out NEW"):
        recorder.seal()
    monkeypatch.undo()
    assert verify(path).ok
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.duckdb", "a.duckdb.head.json", "a.duckdb.wal"]


def test_a_reader_in_another_process_sees_what_was_acknowledged_and_disturbs_nobody(tmp_path: Path) -> None:
    path = tmp_path / "live.duckdb"
    child = process(path, "hold")
    try:
        assert child.stdout.readline() == "ready\n"
        with open_log(path) as log:
            assert [e.seq for e in log.events("r0", "s0")] == [0, 1, 2]
            assert "snapshot" in (log.notice or "")
            assert log.unacknowledged == 0
        assert verify(path).ok
        refused = process(path, "resume")
        out, _ = refused.communicate(timeout=60)
        assert refused.returncode == 2
        assert "another process is recording into it" in out
        child.stdin.write("\n")
        child.stdin.flush()
        child.communicate(timeout=60)
        assert child.returncode == 0
    finally:
        child.kill()
        child.wait()


def test_a_batch_that_comes_while_a_snapshot_is_taken_is_no_lost_tail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two files that the reader copies the recorder acknowledges another batch."""
    path = tmp_path / "live.duckdb"
    with Recorder(path, run_row(), clock=TickClock(), key=KEY, max_latency_s=0) as rec:
        rec.open_session(session_row())
        made = iter(script().events)

        def record_one() -> None:
            e = next(made)
            rec.record(e, tokens=None if (row := script().tokens.get(e.seq)) is None else row.tokens)
            rec.flush()

        def copied_slowly(sources: list[Path], targets: list[Path]) -> None:
            for source, target in zip(sources, targets, strict=True):
                if source.exists():
                    shutil.copyfile(source, target)
                record_one()

        record_one()
        monkeypatch.setattr(live_module, "_copy_elsewhere", copied_slowly)
        result = verify(path)
    assert result.ok, result.findings
    assert "past the acknowledged head" in (result.notice or "")


def test_reading_in_the_recorders_own_process_keeps_its_lock(tmp_path: Path) -> None:
    """A process that opens and closes a file loses its POSIX locks on it; a second recorder must still stay out."""
    path = tmp_path / "own.duckdb"
    with Recorder(path, run_row(), clock=TickClock(), key=KEY) as recorder:
        record_script(recorder, script())
        with open_log(path) as log:
            assert len(log.events("r0", "s0")) == len(script().events)
        assert verify(path).ok
        second = process(path, "resume")
        out, _ = second.communicate(timeout=60)
        assert second.returncode == 2, out
        assert "another process" in out
        recorder.flush()


def test_readers_keep_up_with_a_recorder_that_never_stops(tmp_path: Path) -> None:
    path = tmp_path / "busy.duckdb"
    child = process(path, "forever")
    try:
        lines = [child.stdout.readline()]
        for _ in range(4):
            before = acknowledged(lines)
            with open_log(path) as log:
                seqs = [e.seq for e in log.events("r0", "s0")]
            assert seqs == list(range(len(seqs)))
            assert len(seqs) > before
            assert verify(path).ok
            os.set_blocking(child.stdout.fileno(), False)
            with contextlib.suppress(TypeError):
                lines += [line for line in child.stdout.read().splitlines() if line.startswith("acked ")][:-1]
            os.set_blocking(child.stdout.fileno(), True)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize("mode", ["flushed", "forgotten"])
def test_an_unclosed_recorder_still_writes_at_exit(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "exit.duckdb"
    code = (
        "import sys; from pathlib import Path; from support.logs import *\n"
        "from kvtape.traces.recorder import Recorder\n"
        "r = Recorder(Path(sys.argv[1]), run_row(), clock=TickClock(), key=KEY, max_latency_s=60)\n"
        "r.open_session(session_row()); r.record(event(0)); r.record(event(1))\n"
        + ("raise KeyboardInterrupt" if mode == "forgotten" else "r.flush()")
    )
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=TESTS, capture_output=True, timeout=60)
    assert stored_seqs(path) == [0, 1]
    assert verify(path).ok
