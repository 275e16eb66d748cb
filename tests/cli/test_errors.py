"""Exit codes and the one line: each kind of exception, and that the table names classes that exist."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    EnvironmentProblem,
    FatalClass,
    SessionFatal,
    UsageError,
)
from kvtape.capacity.errors import CapacityError, ModelFileError
from kvtape.cli.errors import EXIT_CODES, describe
from kvtape.planner.events import Event, Op
from kvtape.planner.grammar import SpecError
from kvtape.planner.residency import IllegalEvent
from kvtape.planner.user_policy import PolicyFailed
from kvtape.traces.errors import LogExists, LogUnreadable, LogWriteFailed, NotALog
from support.command import kvtape_process

CLOSED = Event(run_id="r", session_id="s", seq=0, at_ns=0, op=Op.CLOSE, turn=0, generation=0)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UsageError("x"), 2),
        (ContextOverflow(5, 4, "x"), 2),
        (SpecError("x"), 2),
        (PolicyFailed("mine:keep", "x"), 2),
        (IllegalEvent(CLOSED, "x"), 1),
        (CapacityError("x"), 2),
        (ModelFileError("x"), 2),
        (NotALog("x"), 2),
        (LogExists("x"), 2),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), 2),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), 2),
        (EnvironmentProblem("x"), 3),
        (LogWriteFailed("x"), 3),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 3),
        (MemoryError(), 3),
        (ModuleNotFoundError("x", name="llama_cpp.llama_cpp"), 3),
        (LogUnreadable("x"), 4),
        (SessionFatal(FatalClass.DECODE_FAILED, "x"), 1),
        (Cancelled("x"), 130),
        (KeyboardInterrupt(), 130),
        (RuntimeError("Query interrupted"), 130),
        (RuntimeError("x"), 1),
        (ZeroDivisionError("x"), 1),
    ],
)
def test_exit_code(error: BaseException, code: int) -> None:
    assert describe(error)[0] == code


def test_a_subclass_has_the_code_of_its_base() -> None:
    class Narrower(SpecError):
        pass

    assert describe(Narrower("x"))[0] == 2


def test_the_table_names_classes_that_exist() -> None:
    for name in EXIT_CODES:
        module, _, cls = name.rpartition(".")
        found = getattr(import_module(module), cls)
        assert issubclass(found, Exception)
        # A class is looked up by where it is defined; a name that is only imported there is never met.
        assert f"{found.__module__}.{found.__qualname__}" == name


def test_the_line_is_one_line_and_names_the_remedy() -> None:
    assert describe(UsageError("first\n  second"))[1] == "first second"
    assert "kvtape[llama]" in describe(ModuleNotFoundError("no", name="llama_cpp"))[1]
    assert "kvtape[openvino]" in describe(ModuleNotFoundError("no", name="openvino.frontend"))[1]
    assert "--debug" in describe(ZeroDivisionError("x"))[1]
    assert describe(OSError(errno.ENOSPC, "No space left on device", "a.duckdb"))[1].startswith("a.duckdb: no space")


def test_another_missing_module_is_an_internal_error() -> None:
    assert describe(ModuleNotFoundError("no", name="something_else"))[0] == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_traceback(closed: str, tmp_path: Path) -> None:
    command = f"'{sys.executable}' -m kvtape.cli verify '{tmp_path / 'gone.duckdb'}' {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_name_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    name = os.fsdecode(bytes(tmp_path) + b"/n\xff.duckdb")
    Path(name).touch()
    ran = kvtape_process(["show", name])
    assert (ran.code, ran.out) == (2, "")
    assert "no UTF-8" in ran.err
    assert ran.err.count("\n") == 1
