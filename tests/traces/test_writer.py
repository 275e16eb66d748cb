"""The columnar path below the recorder."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pyarrow as pa
import pytest

from kvtape.traces import database as database_module
from kvtape.traces import keys as keys_module
from kvtape.traces import writer as writer_module
from kvtape.traces.codec import to_arrow
from kvtape.traces.errors import LogExists, LogWriteFailed
from kvtape.traces.keys import key_id, key_path
from kvtape.traces.reader import open_log
from kvtape.traces.schema import EVENTS, RUNS, SESSIONS
from kvtape.traces.sidecar import read_head
from kvtape.traces.verify import verify
from kvtape.traces.writer import LogWriter
from support.logs import KEY, event, run_row, session_row


def first_batch() -> dict[str, pa.Table]:
    return {RUNS.name: to_arrow(RUNS, [run_row()]), SESSIONS.name: to_arrow(SESSIONS, [session_row()])}


def test_columns_in_any_order_of_rows_give_one_log(tmp_path: Path) -> None:
    events = [event(seq, at_ns=seq) for seq in range(100)]
    digests = []
    for name, rows in (("a", events), ("b", events[::-1])):
        writer = LogWriter.create(tmp_path / f"{name}.duckdb", run_row(), KEY)
        writer.append(first_batch())
        head = writer.append({EVENTS.name: to_arrow(EVENTS, rows)})
        writer.close()
        assert (head.batch, head.rows, head.sessions) == (2, 102, {"r0/s0": 99})
        assert verify(writer.path).ok
        assert read_head(writer.path) == head
        digests.append(head.digest)
    assert digests[0] == digests[1]


def test_after_a_failed_acknowledgement_the_writer_takes_nothing_and_resume_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is committed, its sidecar is not: ahead of its head is fine, the same batch twice would not be."""
    path = tmp_path / "a.duckdb"
    writer = LogWriter.create(path, run_row(), KEY)
    writer.append(first_batch())

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(writer_module, "write_head", full)
    with pytest.raises(OSError, match="No space"):
        writer.append({EVENTS.name: to_arrow(EVENTS, [event(0)])})
    monkeypatch.undo()
    with pytest.raises(LogWriteFailed, match="resume"):
        writer.append({EVENTS.name: to_arrow(EVENTS, [event(0)])})
    writer.close()
    assert verify(path).ok
    again = LogWriter.resume(path, KEY)
    assert again.head.batch == 2
    again.append({EVENTS.name: to_arrow(EVENTS, [event(1)])})
    again.close()
    assert verify(path).ok
    with open_log(path) as log:
        assert [e.seq for e in log.events("r0", "s0")] == [0, 1]


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_a_file_system_without_hard_links_gets_its_log_and_nothing_is_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refused(*args: object) -> None:
        raise OSError(code, "no links here")

    monkeypatch.setattr(os, "link", refused)
    path = tmp_path / "a.duckdb"
    LogWriter.create(path, run_row(), KEY).close()
    with pytest.raises(LogExists):
        LogWriter.create(path, run_row(), KEY)
    assert verify(path).ok


@pytest.mark.parametrize("step", ["key", "file"])
def test_of_two_recorders_that_start_together_one_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The second one comes while the first writes its key, or has made its file but not named it yet."""
    path = tmp_path / "a.duckdb"
    module = keys_module if step == "key" else database_module
    original = module.give_name

    def late(fresh: Path, target: Path) -> None:
        monkeypatch.undo()
        LogWriter.create(path, run_row()).close()
        original(fresh, target)

    monkeypatch.setattr(module, "give_name", late)
    with pytest.raises(LogExists, match="already there"):
        LogWriter.create(path, run_row())
    assert verify(path).ok
    with open_log(path) as log:
        assert log.meta["key_id"] == key_id(key_path(path).read_bytes())
    assert {p.name for p in tmp_path.iterdir()} == {"a.duckdb", "a.duckdb.head.json", "kvtape.key"}
