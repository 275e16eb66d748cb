"""Running the command line: in this process where that is quick and enough, as a process where the frame matters."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.cli import main

__all__ = ["Ran", "kvtape", "kvtape_process"]


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command gave back."""

    code: int
    out: str
    err: str


def kvtape(*args: object) -> Ran:
    """Run in this process; stdout and stderr are no terminals."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([str(a) for a in args])
    return Ran(code, out.getvalue(), err.getvalue())


def kvtape_process(args: Sequence[object], *, stdin: bytes = b"", **environment: str) -> Ran:
    """Run as a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "kvtape.cli", *(str(a) for a in args)],
        input=stdin,
        capture_output=True,
        env={**os.environ, **environment},
        check=False,
    )
    return Ran(done.returncode, done.stdout.decode(), done.stderr.decode())
