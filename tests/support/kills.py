"""kill -9 of real recorder processes at random moments, many a second: each is a fork of a warmed process.

The parent of the forks has imported everything and opened nothing, so that a fork is a fresh recorder.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import resource
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

from kvtape.traces.errors import TraceError
from kvtape.traces.recorder import Recorder
from kvtape.traces.writer import LogWriter
from support.workload import judge, record_log

__all__ = ["FAULTS", "Toll", "fill_disks", "kill_recorders"]

_EVENTS = 60


@dataclass(slots=True)
class Toll:
    """What a series of trials came to: `wrong` has a line for everything that must never be."""

    trials: int = 0
    acknowledged: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def _flush_does_not_wait() -> Any:
    return mock.patch.object(Recorder, "flush", return_value=0)


def _batch_in_two_transactions() -> Any:
    original = LogWriter._insert

    def insert(self: LogWriter, name: str, rows: Any) -> None:
        half = rows.num_rows // 2
        original(self, name, rows.slice(0, half))
        if half:
            self.connection.execute("COMMIT")
            time.sleep(0.002)
            self.connection.execute("BEGIN")
        original(self, name, rows.slice(half))

    return mock.patch.object(LogWriter, "_insert", insert)


def _sidecar_before_commit() -> Any:
    """The head is written for a batch that is still being committed."""
    import kvtape.traces.writer as writer

    original = writer.LogWriter._insert

    def insert(self: LogWriter, name: str, rows: Any) -> None:
        batch = rows.column("batch")[-1].as_py()
        writer.write_head(self.path, writer.Head(self.head.log_id, batch, "0" * 64, 0, {}, self.head.file))
        time.sleep(0.002)
        original(self, name, rows)

    return mock.patch.object(LogWriter, "_insert", insert)


FAULTS: dict[str, Callable[[], Any]] = {
    "none": nullcontext,
    "flush does not wait": _flush_does_not_wait,
    "a batch in two transactions": _batch_in_two_transactions,
    "the sidecar before the commit": _sidecar_before_commit,
}
"""Planted in the recorder: all but `none` must be found."""


def _recorder(folder: str, fault: str, file_bytes: int | None, pipe: Connection) -> None:
    """One log after the other until killed; with a limit on the size of files, one log until it fails."""
    said = pipe.send
    if file_bytes is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
    with FAULTS[fault]():
        for number in range(1 if file_bytes is not None else 1 << 30):
            path = Path(folder) / f"{number}.duckdb"
            try:
                record_log(path, _EVENTS, lambda line, n=number: said((n, line)))  # type: ignore[misc]
            except TraceError as err:
                said((number, f"{type(err).__name__} {err.exit_code}"))
    os._exit(0)


def _start(folder: Path, fault: str, file_bytes: int | None) -> tuple[Any, Connection]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["support.kills"])
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_recorder, args=(str(folder), fault, file_bytes, theirs), daemon=True)
    child.start()
    theirs.close()
    return child, ours


def _all_said(pipe: Connection) -> Iterator[tuple[int, str]]:
    try:
        while True:
            yield pipe.recv()
    except (EOFError, OSError):
        return


def kill_recorders(folder: Path, trials: int, *, seed: int, fault: str = "none", longest_s: float = 0.25) -> Toll:
    """Kill `trials` recorders, each at a moment of its own up to `longest_s` after it began, and judge what is left."""
    rng, toll = random.Random(seed), Toll()
    for trial in range(trials):
        where = folder / f"kill-{seed}-{trial}"
        where.mkdir()
        child, pipe = _start(where, fault, None)
        began = pipe.recv()  # the first log is open: fork and imports are no part of the delay
        time.sleep(rng.uniform(0, longest_s))
        os.kill(child.pid, signal.SIGKILL)
        said = [began, *_all_said(pipe)]
        child.join()
        pipe.close()
        _judge_all(where, said, toll, f"trial {trial}")
        shutil.rmtree(where)
    return toll


def fill_disks(folder: Path, limits: list[int], *, fault: str = "none") -> Toll:
    """Record until files may not grow past a limit (bytes), for each limit, and judge what is left."""
    toll = Toll()
    for limit in limits:
        where = folder / f"full-{limit}"
        where.mkdir()
        child, pipe = _start(where, fault, limit)
        said = list(_all_said(pipe))
        child.join()
        pipe.close()
        failed = [line for _, line in said if line.startswith("LogWriteFailed")]
        if not failed and (0, "sealed") not in said:
            toll.wrong.append(f"limit {limit}: neither sealed nor LogWriteFailed, but {said[-1:]}")
        if any(not line.endswith(" 3") for line in failed):
            toll.wrong.append(f"limit {limit}: exit code {failed}")
        toll.outcomes["failed" if failed else "fitted"] += 1
        _judge_all(where, [(n, line) for n, line in said if line not in failed], toll, f"limit {limit}")
        shutil.rmtree(where)
    return toll


def _judge_all(where: Path, said: list[tuple[int, str]], toll: Toll, name: str) -> None:
    toll.trials += 1
    last = max((number for number, _ in said), default=-1)
    for number in range(last + 2):  # also the one that was being made
        lines = [line for n, line in said if n == number]
        verdict = judge(where / f"{number}.duckdb", lines, where / f"{number}.repaired.duckdb")
        toll.acknowledged += max((int(s.split()[1]) + 1 for s in lines if s.startswith("acked ")), default=0)
        toll.outcomes[verdict.how] += 1
        if verdict.wrong is not None:
            toll.wrong.append(f"{name}, log {number}: {verdict.wrong}")
