"""A log folder: many recorders, each with a segment of its own and no server between them.

    manifest.jsonl     one line for each segment that was begun and for each that was sealed, appended under a lock
    <name>.duckdb      a segment: a log like any other, live or sealed
    kvtape.key         one key for all of them

A segment is registered before its recorder says that anything is durable, so one that is in the manifest and not in the
folder was lost; one that is in the folder and not in the manifest was left by a recorder that died while it began.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvtape.traces.errors import LogUnreadable, NotALog
from kvtape.traces.sidecar import Head, fsync_dir

__all__ = ["MANIFEST", "Segment", "is_log_folder", "new_segment", "register", "segments"]

MANIFEST = "manifest.jsonl"


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment: its file, whether the manifest has it and it is there, and the chain digest it was sealed with."""

    path: Path
    registered: bool
    there: bool
    sealed_digest: str | None


def is_log_folder(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def new_segment(folder: Path) -> Path:
    """A name for one more segment; makes the folder a log folder when it is empty. Raises NotALog for another one."""
    manifest = folder / MANIFEST
    if not manifest.exists():
        if any(p.name != "kvtape.key" and not p.name.startswith(MANIFEST) for p in folder.iterdir()):
            raise NotALog(f"{folder}: neither empty nor a log folder (it has no {MANIFEST}); give a new folder")
        manifest.touch()
        fsync_dir(folder)
    return folder / f"segment-{secrets.token_hex(8)}.duckdb"


def register(log: Path, head: Head) -> None:
    """Note in the manifest that a segment was begun, or sealed; durable on return. Nothing for a log in no folder."""
    manifest = log.parent / MANIFEST
    if not manifest.exists():
        return
    entry: dict[str, str | int] = {
        "segment": log.name,
        "log_id": head.log_id,
        "state": "sealed" if head.sealed else "begun",
    }
    if head.sealed:
        entry |= {"batches": head.batch, "rows": head.rows, "digest": head.digest}
    line = json.dumps(entry, sort_keys=True, separators=(",", ":")) + "\n"
    with manifest.open("r+b") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        whole = handle.read()
        handle.seek(0, os.SEEK_END)
        # A recorder that died while it wrote its line: close it, so that it costs no other line.
        handle.write(("" if not whole or whole.endswith(b"\n") else "\n").encode() + line.encode())
        handle.flush()
        os.fsync(handle.fileno())


def segments(folder: Path) -> list[Segment]:
    """Every segment in the order in which they were begun, the unregistered ones last. Raises LogUnreadable."""
    begun: dict[str, str | None] = {}
    for line in _entries(folder):
        digest = line.get("digest")
        begun[str(line["segment"])] = None if digest is None else str(digest)
    there = {p.name for p in folder.iterdir() if p.suffix == ".duckdb" and p.is_file()}
    names = [*begun, *sorted(there - begun.keys())]
    return [Segment(folder / name, name in begun, name in there, begun.get(name)) for name in names]


def _entries(folder: Path) -> list[Mapping[str, object]]:
    """Lines of the manifest; a line that was cut by a crash names no segment, which the folder itself then does."""
    found: list[Mapping[str, object]] = []
    for line in (folder / MANIFEST).read_bytes().splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if not isinstance(entry, dict) or not isinstance(entry.get("segment"), str):
            raise LogUnreadable(
                f"{folder / MANIFEST}: a line that kvtape never writes: {line[:60]!r}; take it out of the manifest"
            )
        found.append(entry)
    return found
