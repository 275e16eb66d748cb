"""The key of the content hashes: 32 random bytes in a file of its own beside the log, readable by its owner only."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

from kvtape.traces.errors import KeyMismatch

__all__ = ["KEY_BYTES", "key_id", "key_path", "load_or_create_key"]

KEY_BYTES = 32


def key_path(log: Path) -> Path:
    return log.with_name(log.name + ".key")


def load_or_create_key(log: Path) -> bytes:
    """The log's key; drawn and written with mode 0600 when there is none. Raises KeyMismatch for a damaged file."""
    path = key_path(log)
    if not path.exists():
        key = secrets.token_bytes(KEY_BYTES)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.write(descriptor, key)
            os.fsync(descriptor)
        except OSError:
            path.unlink()  # else the next recording would take half a key for a damaged one
            raise
        finally:
            os.close(descriptor)
        return key
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise KeyMismatch(f"{path}: a key has {KEY_BYTES} bytes, this file {len(key)}; put the right key file back")
    return key


def key_id(key: bytes) -> str:
    """Names a key without giving it away: content hashes of two logs compare when their key ids are equal."""
    return hashlib.blake2b(b"kvtape key id", digest_size=8, key=key).hexdigest()
