"""What a recorder asks of the disk, call by call: recorded with strace, as operations on files by identity.

python -m support.disk_calls FOLDER N_EVENTS        the workload that is recorded
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from support.workload import record_log

__all__ = ["Call", "Kind", "record_calls"]

Kind = Literal["create", "write", "cut", "sync", "sync_names", "rename", "link", "unlink", "say"]


@dataclass(frozen=True, slots=True)
class Call:
    """`file`: identity, kept over renames. `name`, `other`: names in the folder. `at`, `data`: what a write puts where;
    for a cut, `at` is the new length; for `say`, `data` is what the recorder was told is durable.
    """

    kind: Kind
    file: int = -1
    name: str = ""
    other: str = ""
    at: int = 0
    data: bytes = b""


_TRACED = (
    "openat,open,creat,close,read,pread64,lseek,write,pwrite64,writev,pwritev,fsync,fdatasync,ftruncate,truncate,"
    "fallocate,copy_file_range,sendfile,rename,renameat,renameat2,link,linkat,unlink,unlinkat,dup,dup2,dup3"
)
_LINE = re.compile(r"(\d+)\s+(.*)$")
_TEXT = r'"((?:\\x[0-9a-f]{2})*)"'


def record_calls(n_events: int) -> list[Call]:
    """The calls of a process that records a log of `n_events` and seals it. Raises RuntimeError without strace."""
    with tempfile.TemporaryDirectory(prefix="kvtape-calls-") as name:
        folder, trace = Path(name) / "log", Path(name) / "trace"
        folder.mkdir()
        command = ["strace", "-f", "-xx", "-s", "100000000", "-e", f"trace={_TRACED}", "-o", str(trace)]
        command += [sys.executable, "-m", "support.disk_calls", str(folder), str(n_events)]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"recording under strace failed: {done.stderr[-500:]}")
        with trace.open(encoding="ascii", errors="replace") as lines:
            return list(_Parser(folder).calls(lines))


class _Parser:
    """Follows descriptors and names of one process; only files in `folder` count."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)
        self._open: dict[int, tuple[int, bool]] = {}
        self._offset: dict[int, int] = {}
        self._files: dict[str, int] = {}
        self._length: dict[int, int] = {}
        self._halves: dict[str, str] = {}

    def calls(self, lines: Iterator[str]) -> Iterator[Call]:
        for line in lines:
            whole = self._whole(line)
            if whole is not None:
                yield from self._call(whole)

    def _whole(self, line: str) -> str | None:
        found = _LINE.match(line)
        if found is None:
            return None
        process, rest = found.groups()
        if rest.endswith("<unfinished ...>"):
            self._halves[process] = rest.removesuffix("<unfinished ...>").rstrip()
            return None
        resumed = re.match(r"<\.\.\. \w+ resumed>(.*)$", rest)
        return self._halves.pop(process, "") + resumed.group(1) if resumed else rest

    def _call(self, line: str) -> Iterator[Call]:
        found = re.match(r"(\w+)\((.*)\)\s*= (-?\d+)", line)
        if found is None or int(found.group(3)) < 0:
            return
        name, arguments, result = found.group(1), found.group(2), int(found.group(3))
        texts = [bytes.fromhex(t.replace("\\x", "")) for t in re.findall(_TEXT, arguments)]
        numbers = [int(n) for n in re.findall(r"(?<![\w\"])\d+(?![\w\"])", re.sub(_TEXT, "", arguments))]
        if name in ("openat", "open", "creat"):
            yield from self._opened(texts[0].decode(), arguments, result)
        elif name == "close":
            self._open.pop(numbers[0], None)
        elif name in ("rename", "renameat", "renameat2", "link", "linkat", "unlink", "unlinkat"):
            yield from self._named(name, [t.decode() for t in texts])
        elif name in ("write", "pwrite64"):
            yield from self._written(name, numbers, texts[0][:result])
        elif numbers and numbers[0] in self._open:
            yield from self._other(name, numbers, result)

    def _opened(self, path: str, arguments: str, descriptor: int) -> Iterator[Call]:
        self._open.pop(descriptor, None)
        if path == self._folder:
            self._open[descriptor] = (-1, False)
        name = self._inside(path)
        if name is None:
            return
        if name not in self._files:
            file = len(self._length)
            self._files[name], self._length[file] = file, 0
            yield Call("create", file, name)
        file = self._files[name]
        if "O_TRUNC" in arguments and self._length[file]:
            self._length[file] = 0
            yield Call("cut", file)
        self._open[descriptor] = (file, "O_APPEND" in arguments)
        self._offset[descriptor] = 0

    def _written(self, name: str, numbers: list[int], data: bytes) -> Iterator[Call]:
        descriptor = numbers[0]
        if descriptor == 1:
            yield from (Call("say", data=line) for line in data.splitlines())
        if descriptor not in self._open:
            return
        file, appends = self._open[descriptor]
        if name == "pwrite64":
            at = numbers[-1]
        else:
            at = self._length[file] if appends else self._offset[descriptor]
            self._offset[descriptor] = at + len(data)
        self._length[file] = max(self._length[file], at + len(data))
        yield Call("write", file, at=at, data=data)

    def _other(self, name: str, numbers: list[int], result: int) -> Iterator[Call]:
        descriptor = numbers[0]
        file, _ = self._open[descriptor]
        if name in ("fsync", "fdatasync"):
            yield Call("sync_names") if file < 0 else Call("sync", file)
        elif name == "ftruncate":
            self._length[file] = numbers[1]
            yield Call("cut", file, at=numbers[1])
        elif name == "lseek":
            self._offset[descriptor] = result
        elif name == "read":
            self._offset[descriptor] = self._offset.get(descriptor, 0) + result
        elif name != "pread64":
            raise RuntimeError(f"{name} on a file of the log: this model of a disk does not know it")

    def _named(self, name: str, paths: list[str]) -> Iterator[Call]:
        names = [self._inside(p) for p in paths]
        if None in names:
            return
        first = str(names[0])
        if name.startswith("unlink"):
            yield Call("unlink", self._files.pop(first), first)
            return
        kind: Kind = "link" if name.startswith("link") else "rename"
        file = self._files[first] if kind == "link" else self._files.pop(first)
        self._files[str(names[1])] = file
        yield Call(kind, file, first, str(names[1]))

    def _inside(self, path: str) -> str | None:
        return path.removeprefix(self._folder + "/") if path.startswith(self._folder + "/") else None


if __name__ == "__main__":
    record_log(Path(sys.argv[1]) / "a.duckdb", int(sys.argv[2]), lambda line: print(line, flush=True))
