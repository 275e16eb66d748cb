"""What `verify` finds. Findings are data: a readable log that fails is still readable."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "FindingKind"]


class FindingKind(StrEnum):
    """First what happened to rows and definitions, then to the chain, then to the sidecar."""

    ALTERED = "altered"
    MISSING = "missing"
    REPEATED = "repeated"
    EXTRA = "extra"
    REORDERED = "reordered"
    STRAY = "stray"
    GAP = "gap"
    FOLD = "fold"
    CONTENT = "content"
    DEFINITION = "definition"
    CHAIN = "chain"
    BATCH_MISSING = "batch_missing"
    LOST_TAIL = "lost_tail"
    HEAD_MISSING = "head_missing"
    HEAD_DAMAGED = "head_damaged"
    HEAD_FOREIGN = "head_foreign"
    HEAD_MISMATCH = "head_mismatch"
    FILE = "file"
    SEGMENT_MISSING = "segment_missing"
    SEGMENT_FOREIGN = "segment_foreign"


@dataclass(frozen=True, slots=True)
class Finding:
    """`batch` and `table` say where, as far as that can be said; `detail` is one line for people."""

    kind: FindingKind
    detail: str
    batch: int | None = None
    table: str | None = None
