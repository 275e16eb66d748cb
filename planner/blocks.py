"""Blocks of tape tokens, how well each is protected, and how a prompt's segments become blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntFlag, StrEnum
from typing import Self

from kvtape.planner.ranges import Range

__all__ = [
    "DEFAULT_BLOCK",
    "NO_FLAGS",
    "PROTECTING",
    "Block",
    "BlockError",
    "CacheClass",
    "Flag",
    "MissingRanges",
    "PromptSegment",
    "default_class",
    "segments_to_blocks",
]

DEFAULT_BLOCK = 32
"""Tokens of one block, counted from its segment's start."""


class CacheClass(StrEnum):
    """Most protected first. `task_pinned` is never evicted by a plan; the others only rank."""

    rank: int
    """0 for the most protected class; a higher rank is evicted first."""

    def __new__(cls, value: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        # Plain attributes: a plan reads the rank of every block, and a lookup by member costs four times as much.
        member.rank = len(cls.__members__)
        return member

    TASK_PINNED = "task_pinned"
    REPO_MAP = "repo_map"
    VOLATILE = "volatile"


_CLASS_OF_KIND = {
    "system": CacheClass.TASK_PINNED,
    "tools": CacheClass.TASK_PINNED,
    "repo_rules": CacheClass.TASK_PINNED,
    "repo_map": CacheClass.REPO_MAP,
    # The *kind* "pinned" is not the class task_pinned.
    "pinned": CacheClass.REPO_MAP,
    "diff": CacheClass.VOLATILE,
    "terminal": CacheClass.VOLATILE,
    "user": CacheClass.VOLATILE,
    "assistant": CacheClass.VOLATILE,
    "tool": CacheClass.VOLATILE,
    "assistant_prompt": CacheClass.VOLATILE,
}


class Flag(IntFlag):
    """PINNED, SINK and RECENT protect a block; RETRIEVED only says that it came back from the cold store."""

    PINNED = 1
    SINK = 2
    RECENT = 4
    RETRIEVED = 8


NO_FLAGS = Flag(0)

# A plain integer: flag arithmetic on the enum costs a microsecond a block.
PROTECTING = int(Flag.PINNED | Flag.SINK | Flag.RECENT)
"""The flags that protect a block."""


def default_class(kind: str, stable: bool = False) -> CacheClass:
    """The class of a segment kind, trimmed and lower-cased; an unknown kind is task_pinned when stable."""
    known = _CLASS_OF_KIND.get(kind.strip().lower())
    if known is not None:
        return known
    return CacheClass.TASK_PINNED if stable else CacheClass.VOLATILE


@dataclass(frozen=True, slots=True)
class Block:
    """Tape positions `[start, stop)` that are kept or evicted together.

    `last_used` is a logical clock. `score` is an attention score, None where none was taken: it lives here and in
    no parallel list. Nothing is validated here; `plan_hot_set` rejects what is no block.
    """

    block_id: int
    start: int
    stop: int
    kind: str
    cache_class: CacheClass
    flags: Flag = NO_FLAGS
    last_used: int = 0
    token_hash: int | None = None
    score: float | None = None

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start

    @property
    def protected(self) -> bool:
        """Whether the block itself, without any span of a plan, may not be evicted."""
        return bool(int(self.flags) & PROTECTING) or self.cache_class is CacheClass.TASK_PINNED


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSegment:
    """A part of a prompt: its tokens, or its tape `bounds`, or neither when it was not tokenised.

    Tokens without bounds follow the segment before. `n_bytes` is the size of its text. An explicit `cache_class`
    wins over the default of `kind`. `required` and `stable` segments may not be missing.
    """

    kind: str
    tokens: tuple[int, ...] | None = None
    bounds: Range | None = None
    n_bytes: int = 0
    stable: bool = False
    required: bool = False
    cache_class: CacheClass | None = None

    @property
    def effective_class(self) -> CacheClass:
        return self.cache_class or default_class(self.kind, self.stable)


class BlockError(ValueError):
    """Segments that cannot become blocks; names the segment."""


class MissingRanges(BlockError):
    """Segments that have to be there were not tokenised.

    `missing` are their indices. `blocks` is the partial list: the blocks whose place is known, which are those
    before the first missing segment and those behind it from the next segment with bounds on.
    """

    def __init__(self, segments: tuple[PromptSegment, ...], missing: tuple[int, ...], blocks: list[Block]) -> None:
        named = ", ".join(f"{i} ({segments[i].kind}, {segments[i].n_bytes} bytes)" for i in missing)
        super().__init__(
            f"segments without tokens or bounds: {named}; tokenise them, or mark them neither required nor stable"
        )
        self.missing = missing
        self.blocks = tuple(blocks)


def segments_to_blocks(
    segments: Iterable[PromptSegment],
    *,
    block: int = DEFAULT_BLOCK,
    first_id: int = 0,
    at: int = 0,
    last_used: int = 0,
) -> list[Block]:
    """Cut each segment into `block`-token blocks from its own start; ids count up from `first_id`.

    The first segment starts at tape position `at`. A segment without tokens and bounds is skipped, or, when it has
    bytes and is required or stable, makes MissingRanges. Raises BlockError for a block size below 1, for tokens
    and bounds of unequal length, and for a segment that starts before the one before it ends.
    """
    if block < 1:
        raise BlockError(f"block size {block}: needs at least 1 token")
    whole = tuple(segments)
    blocks: list[Block] = []
    missing: list[int] = []
    end = at
    placed = True
    for index, segment in enumerate(whole):
        span = _span(index, segment, end)
        if span is None:
            if segment.n_bytes > 0 and (segment.required or segment.stable):
                missing.append(index)
                placed = False
            continue
        if segment.bounds is not None:
            placed = True
        if not placed:
            continue
        if span.start < end:
            raise BlockError(
                f"segment {index} ({segment.kind}) {span} begins before position {end}, where the "
                "segments before it end"
            )
        end = span.stop
        for start in range(span.start, span.stop, block):
            blocks.append(
                Block(
                    block_id=first_id + len(blocks),
                    start=start,
                    stop=min(start + block, span.stop),
                    kind=segment.kind,
                    cache_class=segment.effective_class,
                    last_used=last_used,
                )
            )
    if missing:
        raise MissingRanges(whole, tuple(missing), blocks)
    return blocks


def _span(index: int, segment: PromptSegment, end: int) -> Range | None:
    """Where the segment lies when the segments before it end at `end`; None when it was not tokenised."""
    if segment.bounds is None:
        return None if segment.tokens is None else Range(end, end + len(segment.tokens))
    if segment.tokens is not None and len(segment.tokens) != len(segment.bounds):
        raise BlockError(
            f"segment {index} ({segment.kind}) has {len(segment.tokens)} tokens and bounds "
            f"{segment.bounds} of {len(segment.bounds)}"
        )
    return segment.bounds
