"""`plan_hot_set`: the one pure decision about which resident blocks stay.

tape      0        sink                     end-recent     end
          |--SINK---|------candidates------------|--RECENT--|
stream    keep       evict all that is unprotected    keep
class     keep       evict in order until it fits     keep
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from operator import attrgetter

from kvtape.planner.blocks import Block
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import BlockRef
from kvtape.planner.ranges import Range, RangeSet
from kvtape.planner.ways import Positions, available_ways

__all__ = [
    "BadBudget",
    "BadScore",
    "BadSpan",
    "Diagnostic",
    "InvalidBlock",
    "OverlappingBlocks",
    "Plan",
    "PlanError",
    "StreamPolicy",
    "plan_hot_set",
]


class PlanError(ValueError):
    """The inputs cannot be planned; the message names the block or the number at fault."""


class BadBudget(PlanError):
    """A budget that is negative, zero or no whole number: an empty cache is never planned in silence."""


class BadSpan(PlanError):
    """A negative sink or recent span."""


class InvalidBlock(PlanError):
    """A block that is empty, negative or bears an id that another block has."""


class OverlappingBlocks(PlanError):
    """Two blocks that share tape positions."""


class BadScore(PlanError):
    """A score that is NaN or infinite."""


class Diagnostic(StrEnum):
    """What a plan has to say beside its lists."""

    STREAM_UNSUPPORTED = "stream_unsupported"
    """No way to evict, so a stream plan keeps everything."""
    EVICT_UNSUPPORTED = "evict_unsupported"
    """The same on the class path."""
    OVER_BUDGET = "over_budget"
    """What is kept exceeds the budget."""
    SCORES_INCOMPLETE = "scores_incomplete"
    """Some candidates bear a score and some none, so the order is by recency."""


@dataclass(frozen=True, slots=True)
class StreamPolicy:
    """Keep the first `sink` and the last `recent` tape positions, whatever the budget. Spans in tokens."""

    sink: int
    recent: int
    enabled: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """What stays and what goes; all sizes in tokens, all lists in tape order, every input token in exactly one.

    `keep` are merged ranges, `kept_blocks` the blocks behind them as they were given (the SINK and RECENT marks
    of a plan are its own and do not stick). A block that was split stands in `kept_blocks` as its kept fragments
    and in `evict` as the rest, all under its own id. `overshoot_tokens` were evicted beyond what the budget asked.
    Evictions are executed in descending start.
    """

    budget: int
    total: int
    hot: int
    protected: int
    over_budget: bool
    overshoot_tokens: int
    keep: tuple[Range, ...]
    evict: tuple[BlockRef, ...]
    kept_blocks: tuple[Block, ...]
    diagnostics: tuple[str, ...]


# start, stop, whether it may not be evicted, the block it is (a part of)
_Piece = tuple[int, int, bool, Block]


def plan_hot_set(
    blocks: Iterable[Block],
    *,
    budget: int,
    sink: int = 0,
    recent: int = 0,
    stream: StreamPolicy | None = None,
    capabilities: Capabilities,
    allow_recompute: bool = False,
    split: bool = False,
    positions: Positions = "auto",
) -> Plan:
    """Which blocks stay, of those resident now, in any order.

    Blocks overlapping `[0, sink)` or `[end - recent, end)` (end: the largest stop; with a stream policy the wider
    of both spans) are protected whole, or with `split` cut at the border. With a stream policy every unprotected
    block is evicted; else the most evictable class, then the lower score (when the session takes scores and every
    candidate has one), then the older, then the smaller start go until the rest fits `budget`. Without an
    executable way (`available_ways`) everything is kept and a diagnostic says so.

    A caller about to prefill or decode passes `recent >= 1`: the last resident token must stay.
    Raises BadBudget, BadSpan, InvalidBlock, OverlappingBlocks, BadScore.
    """
    streams = stream is not None and stream.enabled
    if stream is not None and stream.enabled:
        sink, recent = max(sink, stream.sink), max(recent, stream.recent)
    _check_numbers(budget, sink, recent)
    ordered = _checked(blocks)
    pieces = _pieces(ordered, sink, recent, split)
    total = sum(b.stop - b.start for b in ordered)
    diagnostics: list[str] = []
    victims: list[int] = []
    if not available_ways(capabilities, allow_recompute, positions):
        diagnostics.append(Diagnostic.STREAM_UNSUPPORTED if streams else Diagnostic.EVICT_UNSUPPORTED)
    elif streams:
        victims = [i for i, piece in enumerate(pieces) if not piece[2]]
    else:
        victims = _class_victims(pieces, total - budget, capabilities.attention_scores, diagnostics)
    return _assemble(pieces, victims, budget, total, diagnostics)


def _check_numbers(budget: int, sink: int, recent: int) -> None:
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise BadBudget(f"budget {budget!r} is no whole number of tokens; round it up first")
    if budget < 0:
        raise BadBudget(f"budget {budget} is negative")
    if budget == 0:
        raise BadBudget("budget 0 would leave an empty cache; give at least 1 token")
    if sink < 0 or recent < 0:
        raise BadSpan(f"sink {sink} and recent {recent} must not be negative")


def _checked(blocks: Iterable[Block]) -> list[Block]:
    """The blocks in tape order, each valid and none overlapping."""
    ordered = sorted(blocks, key=attrgetter("start", "stop", "block_id"))
    end = 0
    before: Block | None = None
    for block in ordered:
        if not 0 <= block.start < block.stop or block.block_id < 0:
            raise InvalidBlock(
                f"block {block.block_id} [{block.start}, {block.stop}) needs 0 <= start < stop and an id"
            )
        if block.start < end:
            raise OverlappingBlocks(f"block {block.block_id} [{block.start}, {block.stop}) overlaps {before}")
        if block.score is not None and not math.isfinite(block.score):
            raise BadScore(f"block {block.block_id} [{block.start}, {block.stop}) has score {block.score}")
        end, before = block.stop, block
    if len({b.block_id for b in ordered}) != len(ordered):
        ids = sorted(b.block_id for b in ordered)
        twice = next(a for a, b in pairwise(ids) if a == b)
        raise InvalidBlock(f"block id {twice} is used twice")
    return ordered


def _pieces(ordered: list[Block], sink: int, recent: int, split: bool) -> list[_Piece]:
    """The blocks, protected or not; with `split` those that straddle a border in up to three pieces."""
    recent_start = max(0, ordered[-1].stop - recent) if ordered else 0
    pieces: list[_Piece] = []
    for block in ordered:
        start, stop = block.start, block.stop
        middle = (max(start, sink), min(stop, recent_start))
        if block.protected or middle[0] >= middle[1]:
            pieces.append((start, stop, True, block))
        elif middle == (start, stop):
            pieces.append((start, stop, False, block))
        elif not split:
            pieces.append((start, stop, True, block))
        else:
            if start < middle[0]:
                pieces.append((start, middle[0], True, block))
            pieces.append((*middle, False, block))
            if middle[1] < stop:
                pieces.append((middle[1], stop, True, block))
    return pieces


def _class_victims(pieces: list[_Piece], excess: int, use_scores: bool, diagnostics: list[str]) -> list[int]:
    """Indices of the pieces to evict, greedily in order until `excess` tokens are gone."""
    if excess <= 0:
        return []
    candidates = [i for i, piece in enumerate(pieces) if not piece[2]]
    n_scored = sum(1 for i in candidates if pieces[i][3].score is not None) if use_scores else 0
    by_score = 0 < n_scored == len(candidates)
    if n_scored and not by_score:
        diagnostics.append(Diagnostic.SCORES_INCOMPLETE)

    def order(i: int) -> tuple[float, ...]:
        start, stop, _, block = pieces[i]
        score = block.score if by_score and block.score is not None else 0.0
        return (-block.cache_class.rank, score, block.last_used, start, stop)

    victims: list[int] = []
    for i in sorted(candidates, key=order):
        if excess <= 0:
            break
        victims.append(i)
        excess -= pieces[i][1] - pieces[i][0]
    return victims


def _assemble(pieces: list[_Piece], victims: list[int], budget: int, total: int, diagnostics: list[str]) -> Plan:
    gone = set(victims)
    cut = {pieces[i][3].block_id for i in victims}
    evict: list[BlockRef] = []
    kept: list[Block] = []
    last: Block | None = None
    for i, (start, stop, _, block) in enumerate(pieces):
        if i in gone:
            evict.append(BlockRef(block.block_id, start, stop))
        elif block.block_id in cut:
            # The hash was of the whole block's tokens.
            kept.append(replace(block, start=start, stop=stop, token_hash=None))
        elif block is not last:
            kept.append(block)
            last = block
    evicted = sum(ref.stop - ref.start for ref in evict)
    hot = total - evicted
    if hot > budget:
        diagnostics.append(Diagnostic.OVER_BUDGET)
    return Plan(
        budget=budget,
        total=total,
        hot=hot,
        protected=sum(p[1] - p[0] for p in pieces if p[2]),
        over_budget=hot > budget,
        overshoot_tokens=max(0, evicted - max(0, total - budget)),
        keep=RangeSet((b.start, b.stop) for b in kept).ranges,
        evict=tuple(evict),
        kept_blocks=tuple(kept),
        diagnostics=tuple(diagnostics),
    )
