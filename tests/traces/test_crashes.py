"""A sample of the long run (`make soak`): kills, power cuts, full disks, aborted checkpoints and flipped bits.

Every detector is shown a fault that it must find.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import duckdb
import pytest

from kvtape.traces.database import wal_path
from kvtape.traces.errors import LogWriteFailed
from kvtape.traces.recorder import Recorder
from kvtape.traces.verify import verify
from support import crash_states, kills
from support.crash_states import VARIANTS, survey
from support.disk_calls import Call, record_calls
from support.flips import flip_bits
from support.logs import KEY, TickClock, record_script, run_row, script
from support.workload import judge, record_log

ABORT_POINTS = ("before_header", "before_truncate", "after_free_list_write", "before_wal_finish")


def test_nothing_acknowledged_is_lost_to_kills(tmp_path: Path) -> None:
    toll = kills.kill_recorders(tmp_path, 8, seed=1)
    assert toll.wrong == []
    assert toll.acknowledged > 60


@pytest.mark.parametrize("fault", [f for f in kills.FAULTS if f != "none"])
def test_kills_find_a_recorder_that_lies(tmp_path: Path, fault: str) -> None:
    for seed in range(10):
        if kills.kill_recorders(tmp_path, 4, seed=seed, fault=fault, longest_s=0.1).wrong:
            return
    pytest.fail("forty kills did not find it")


def test_a_full_disk_anywhere_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    toll = kills.fill_disks(tmp_path, [0, 1_100_000, 1_120_000, 8_000_000])
    assert toll.wrong == []
    assert toll.outcomes["failed"] > 1
    assert toll.outcomes["fitted"] > 0


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not here to record what a recorder asks of the disk")
    return record_calls(30)


def test_every_power_cut_leaves_what_was_acknowledged(calls: Sequence[Call], tmp_path: Path) -> None:
    found = survey(calls, tmp_path, seed=2, every=14)
    assert found.wrong == []
    assert {name.split()[0] for name in found.outcomes} == set(VARIANTS)
    assert sum(n for name, n in found.outcomes.items() if name.endswith("whole")) > 10


@pytest.mark.parametrize("fault", crash_states.FAULTS)
def test_power_cuts_find_a_recorder_that_forgets(calls: Sequence[Call], tmp_path: Path, fault: str) -> None:
    assert survey(crash_states.FAULTS[fault](calls), tmp_path, seed=3, every=12, first_only=True).wrong


@pytest.mark.parametrize("point", ABORT_POINTS)
def test_a_checkpoint_that_aborts_while_sealing_leaves_the_log_as_it_was(tmp_path: Path, point: str) -> None:
    path = tmp_path / "a.duckdb"
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY)
    record_script(recorder, script())
    recorder._writer.connection.execute(f"PRAGMA debug_checkpoint_abort='{point}'")
    with pytest.raises(LogWriteFailed, match="sealing failed"):
        recorder.seal()
    assert verify(path).ok
    assert wal_path(path).exists(), "still the log that was recorded"
    with Recorder(path, run_row(), clock=TickClock(), key=KEY, resume=True) as again:
        again.seal()
    assert verify(path).ok
    assert not wal_path(path).exists()


@pytest.mark.parametrize("point", ABORT_POINTS)
def test_a_checkpoint_that_aborts_while_the_log_is_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    connect = duckdb.connect

    def aborting(name: str, **options: object) -> duckdb.DuckDBPyConnection:
        connection = connect(name, **options)  # type: ignore[arg-type]
        connection.execute(f"PRAGMA debug_checkpoint_abort='{point}'")
        return connection

    monkeypatch.setattr(duckdb, "connect", aborting)
    with pytest.raises(LogWriteFailed):
        Recorder(tmp_path / "a.duckdb", run_row(), clock=TickClock(), key=KEY)
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    said: list[str] = []
    record_log(tmp_path / "a.duckdb", 3, said.append)
    assert judge(tmp_path / "a.duckdb", said, tmp_path / "none").wrong is None


@pytest.mark.parametrize(
    ("seal", "suffix"), [(False, ""), (False, ".wal"), (False, ".head.json"), (True, ""), (True, ".head.json")]
)
def test_every_flipped_bit_is_noticed(tmp_path: Path, seal: bool, suffix: str) -> None:
    record_log(tmp_path / "a.duckdb", 40, lambda line: None, seal=seal)
    copies = tmp_path / "copies"
    copies.mkdir()
    tally = flip_bits(tmp_path / "a.duckdb", suffix, copies, n=8, seed=5)
    assert (tally.flips, tally.missed) == (8, [])
