"""A process on a terminal of its own, and what a reader of that terminal sees."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

__all__ = ["Terminal"]

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[()][A-Z0-9]|\x1b[=>]")
_PATIENCE_S = 60.0


class Terminal:
    """`python ARGS...` with stdin, stdout and stderr on a pseudo-terminal of `rows` by `columns`.

    `raw`: everything that was written, escape sequences included; what `until` and `end` give is without these.
    `quiet`: stderr is no terminal, and nobody sees what is written there.
    """

    def __init__(
        self, args: Sequence[object], *, rows: int = 24, columns: int = 80, quiet: bool = False, **environment: str
    ) -> None:
        self.raw = ""
        # A letter may come in two pieces.
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        gone = ("NO_COLOR", "FORCE_COLOR", "KVTAPE_PROGRESS", "COLUMNS", "LINES")
        inherited = {name: value for name, value in os.environ.items() if name not in gone}
        self.process = subprocess.Popen(
            [sys.executable, *(str(arg) for arg in args)],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.DEVNULL if quiet else slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**inherited, "TERM": "xterm-256color", **environment},
        )
        os.close(slave)
        self._master = master

    def until(self, wanted: Callable[[str], bool]) -> str:
        """What was seen so far, as soon as `wanted` says yes to it. Fails when the process ends before."""
        end = time.monotonic() + _PATIENCE_S
        while not wanted(self.seen):
            assert time.monotonic() < end, f"not within {_PATIENCE_S:.0f} s; seen: {self.seen[-2000:]!r}"
            assert self._read(), f"ended before; seen: {self.seen[-2000:]!r}"
        return self.seen

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def echoes(self) -> bool:
        """Whether what is typed is shown and read by lines, as a terminal does until a program wants it otherwise."""
        local: int = termios.tcgetattr(self._master)[3]
        return bool(local & termios.ECHO) and bool(local & termios.ICANON)

    def end(self, code: int | None = 0) -> str:
        """What was seen until the process ended, with exit code `code` (None: any)."""
        while self._read():
            pass
        ended = self.process.wait(_PATIENCE_S)
        assert code is None or ended == code, f"exit code {ended}; seen: {self.seen[-2000:]!r}"
        return self.seen

    @property
    def seen(self) -> str:
        return _ESCAPES.sub("", self.raw).replace("\r\n", "\n")

    def _read(self) -> bool:
        ready, _, _ = select.select([self._master], [], [], 1.0)
        if not ready:
            return self.process.poll() is None
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says EIO when the other end is closed
            return False
        self.raw += self._decoder.decode(data)
        return bool(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
