"""The key of the content hashes: 32 random bytes in `kvtape.key`, one for all logs of a folder, so that they compare.

Only its owner may read it. It is never copied: a log that moves to another folder leaves it behind.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path

from kvtape.traces.database import give_name
from kvtape.traces.errors import KeyMismatch
from kvtape.traces.leftovers import claimed

__all__ = ["KEY_BYTES", "KEY_NAME", "key_id", "key_path", "load_or_create_key", "stored_key"]

KEY_BYTES = 32
KEY_NAME = "kvtape.key"


def key_path(log: Path) -> Path:
    """The key of the folder in which the log lies."""
    return log.with_name(KEY_NAME)


def load_or_create_key(log: Path) -> bytes:
    """The folder's key; drawn and written with mode 0600 when there is none. Raises KeyMismatch for a damaged file."""
    path = key_path(log)
    if not path.exists():
        _create(path)
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise KeyMismatch(f"{path}: a key has {KEY_BYTES} bytes, this file {len(key)}; put the right key file back")
    return key


def _create(path: Path) -> None:
    """The key appears under its name whole: half a key, or another recorder's, must not be taken for this one."""
    with claimed(path) as fresh:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, secrets.token_bytes(KEY_BYTES))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):  # another recorder was quicker; its key is as good
            give_name(fresh, path)


def stored_key(log: Path, wanted_id: str | None) -> bytes | None:
    """The key beside the log; None when there is none or when it is not the one named `wanted_id`."""
    path = key_path(log)
    key = path.read_bytes() if path.is_file() else b""
    return key if len(key) == KEY_BYTES and key_id(key) == wanted_id else None


def key_id(key: bytes) -> str:
    """Names a key without giving it away: content hashes of two logs compare when their key ids are equal."""
    return hashlib.blake2b(b"kvtape key id", digest_size=8, key=key).hexdigest()
