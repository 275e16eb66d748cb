"""The envelope around engine state: what engines do not check themselves.

    b"KVTAPE1\\n"  u32 header length  header (JSON)  payload  blake2b-32 over all before it

Engine blobs carry no checksum and no model identity; a flipped bit or a same-shaped blob of another model is
accepted in silence. `unwrap` refuses both before the engine sees a byte.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

from kvtape.backends.errors import StateRejected

__all__ = ["unwrap", "wrap"]

_MAGIC = b"KVTAPE1\n"
_DIGEST_BYTES = 32


def wrap(header: Mapping[str, Any], payload: bytes) -> bytes:
    """Envelope of `payload`; `header` must be JSON and name what the reader has to match."""
    head = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    body = b"".join((_MAGIC, struct.pack("<I", len(head)), head, payload))
    return body + hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest()


def unwrap(blob: bytes, expected: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Header and payload. Raises StateRejected naming what is damaged or which expected entry differs."""
    prefix = len(_MAGIC) + 4
    if len(blob) < prefix + _DIGEST_BYTES or not blob.startswith(_MAGIC):
        raise StateRejected(f"not a kvtape state ({len(blob)} bytes)")
    body, digest = blob[:-_DIGEST_BYTES], blob[-_DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=_DIGEST_BYTES).digest() != digest:
        raise StateRejected("saved state is damaged: its checksum does not match")
    (length,) = struct.unpack_from("<I", blob, len(_MAGIC))
    header: dict[str, Any] = json.loads(body[prefix : prefix + length])
    for key, want in expected.items():
        if header.get(key) != want:
            raise StateRejected(f"saved state has {key} {header.get(key)!r}, this session needs {want!r}")
    return header, body[prefix + length :]
