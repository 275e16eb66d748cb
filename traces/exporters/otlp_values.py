"""Attribute values and ids as OTLP writes them in JSON."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

__all__ = ["attributes", "identity"]


def attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Key-value pairs in the order given, without those that are None."""
    return [{"key": key, "value": _value(value)} for key, value in values.items() if value is not None]


def _value(value: Any) -> dict[str, Any]:
    """64-bit whole numbers are text in OTLP's JSON."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list | tuple):
        return {"arrayValue": {"values": [_value(v) for v in value]}}
    return {"stringValue": str(value)}


def identity(n_bytes: int, *parts: str) -> str:
    """Hex of `n_bytes`, the same for the same parts; never all zeros, which is no id."""
    digest = hashlib.blake2b(digest_size=n_bytes, person=b"kvtape otlp")
    for part in parts:
        raw = part.encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    found = digest.digest()
    return (found if any(found) else b"\1" * n_bytes).hex()
