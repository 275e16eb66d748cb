"""Saved states without content: books in an envelope that says how large the real one would be."""

from __future__ import annotations

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import StateRejected
from kvtape.planner.layout import Layout, Segment

__all__ = ["ModelledBlob", "pack", "unpack"]


class ModelledBlob(bytes):
    """Bytes whose length is that of the state they stand for, so that budgets and events count real sizes."""

    n_bytes: int

    def __len__(self) -> int:
        return self.n_bytes


def pack(kind: str, layout: Layout, n_bytes: int) -> ModelledBlob:
    """`kind` is block or snapshot; `n_bytes` what the engine's own envelope would take."""
    rows = [[s.tape_start, s.length, s.cache_start] for s in layout]
    blob = ModelledBlob(wrap({"kind": kind, "rows": rows}, b""))
    blob.n_bytes = n_bytes
    return blob


def unpack(kind: str, blob: bytes) -> Layout:
    """Raises StateRejected for a state that this backend did not save as `kind`."""
    header, _ = unwrap(bytes(memoryview(blob)), {"kind": kind})
    rows = header.get("rows")
    if not isinstance(rows, list):
        raise StateRejected("the saved state holds no rows")
    return tuple(Segment(*row) for row in rows)
