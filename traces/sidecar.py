"""The head of a log in a file of its own, `<log>.head.json`: what was acknowledged last.

A damaged length field makes DuckDB drop the rest of a write-ahead log without a word; only something outside the
database can say that acknowledged events are gone. A file ahead of its head is fine (committed, not acknowledged);
a head ahead of its file is a lost tail.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

__all__ = ["Head", "file_digest", "fsync_dir", "head_path", "read_head", "replace_file", "session_key", "write_head"]


@dataclass(frozen=True, slots=True)
class Head:
    """What was acknowledged last.

    `batch` and its chain `digest` (hex); `rows` of all tables so far; last seq of each "run/session"; `file`: SHA-256
    (hex) over the bytes of the database file, which nobody writes between its making and its sealing, nor after.
    """

    log_id: str
    batch: int
    digest: str
    rows: int
    sessions: dict[str, int]
    file: str
    sealed: bool = False

    def as_sealed(self, file: str) -> Head:
        return replace(self, sealed=True, file=file)


def head_path(log: Path) -> Path:
    return log.with_name(log.name + ".head.json")


def session_key(run_id: str, session_id: str) -> str:
    return f"{run_id}/{session_id}"


def file_digest(path: Path) -> str:
    """SHA-256 hex over the bytes of a file."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_head(log: Path, head: Head) -> None:
    """Replace the sidecar so that a crash leaves the old one or the new one, and the new one after return."""
    text = json.dumps({f.name: getattr(head, f.name) for f in fields(head)}, sort_keys=True, separators=(",", ":"))
    replace_file(head_path(log), text)


def replace_file(path: Path, content: str | bytes, *, beside: str = ".new") -> None:
    """Give `path` a new content, text as UTF-8, durable on return; a crash leaves the old one or the new one.

    It is written to a file beside it first, whose name ends with `beside`.
    """
    temporary = path.with_name(path.name + beside)
    try:
        with temporary.open("wb") as handle:
            handle.write(content.encode() if isinstance(content, str) else content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def read_head(log: Path, shown: Path | None = None) -> Head | None:
    """The sidecar; None where there is none. Raises ValueError when it is not one, naming that of the log `shown`."""
    path, name = head_path(log), head_path(shown or log).name
    try:
        data = json.loads(path.read_bytes())
        head = Head(**data)
    except FileNotFoundError:
        return None
    except (TypeError, ValueError) as err:
        raise ValueError(f"{name} is damaged ({err})") from err
    wanted = {"log_id": str, "batch": int, "digest": str, "rows": int, "sessions": dict, "file": str, "sealed": bool}
    if any(type(getattr(head, name)) is not kind for name, kind in wanted.items()):
        raise ValueError(f"{name} is damaged (wrong types)")
    return head


def fsync_dir(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
