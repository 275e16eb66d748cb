"""`Plan`: what a decision keeps and evicts, as arrays, with the lists of objects made when they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from kvtape.planner.blocks import Block
from kvtape.planner.events import BlockRef
from kvtape.planner.ranges import Range
from kvtape.planner.spans import Free
from kvtape.planner.table import BlockTable, Bools, Ints

__all__ = ["Diagnostic", "Plan", "make_plan"]


class Diagnostic(StrEnum):
    """What a plan has to say beside its lists."""

    STREAM_UNSUPPORTED = "stream_unsupported"
    """No way to evict, so a stream plan keeps everything."""
    EVICT_UNSUPPORTED = "evict_unsupported"
    """The same on the other paths."""
    OVER_BUDGET = "over_budget"
    """What is kept exceeds the budget."""
    SCORES_INCOMPLETE = "scores_incomplete"
    """Some candidates bear a score and some none: `class` goes by recency, a scored policy evicts the others last."""
    SCORES_MISSING = "scores_missing"
    """No candidate bears a score, so a scored policy keeps what `stream` would."""
    STARVED = "starved"
    """Written `starved=N`: blocks evicted by score that are newer than every candidate that stays."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What stays and what goes; all sizes in tokens, all lists in tape order, every input token in exactly one.

    `evict_ids`, `evict_starts`, `evict_stops` int64 `[n_evicted]`; `keep_starts`, `keep_stops` int64 `[n_ranges]`,
    merged. The properties `keep`, `evict` and `kept_blocks` are the same as objects, built when first read.
    `overshoot_tokens` were evicted beyond what the budget asked. `starved`: see `Diagnostic.STARVED`. Evictions
    are executed in descending start.
    """

    budget: int
    total: int
    hot: int
    protected: int
    over_budget: bool
    overshoot_tokens: int
    starved: int
    diagnostics: tuple[str, ...]
    keep_starts: Ints = field(repr=False)
    keep_stops: Ints = field(repr=False)
    evict_ids: Ints = field(repr=False)
    evict_starts: Ints = field(repr=False)
    evict_stops: Ints = field(repr=False)
    _whole: tuple[tuple[Block, ...], Bools] = field(repr=False)
    """Every block, and which of them stay whole."""
    _parts: tuple[Block, ...] = field(repr=False)
    """What stays of blocks that were split."""

    @cached_property
    def keep(self) -> tuple[Range, ...]:
        """The kept ranges, merged."""
        return tuple(map(Range, self.keep_starts.tolist(), self.keep_stops.tolist()))

    @cached_property
    def evict(self) -> tuple[BlockRef, ...]:
        """The evicted blocks; of a block that was split the part that goes, under the block's own id."""
        return tuple(map(BlockRef, self.evict_ids.tolist(), self.evict_starts.tolist(), self.evict_stops.tolist()))

    @cached_property
    def kept_blocks(self) -> tuple[Block, ...]:
        """The blocks behind `keep` as they were given: the SINK and RECENT marks of a plan do not stick.

        A block that was split stands here as its kept fragments, under its own id.
        """
        blocks, mask = self._whole
        kept = [blocks[i] for i in np.flatnonzero(mask).tolist()]
        return tuple(sorted((*kept, *self._parts), key=lambda b: b.start)) if self._parts else tuple(kept)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def _content(self) -> tuple[object, ...]:
        numbers = (self.budget, self.total, self.hot, self.protected, self.over_budget, self.overshoot_tokens)
        return (*numbers, self.starved, self.diagnostics, self.keep, self.evict, self.kept_blocks)


def make_plan(
    table: BlockTable, free: Free, victims: Ints, budget: int, diagnostics: Sequence[str], starved: int = 0
) -> Plan:
    """The plan that evicts the free parts of the blocks at the indices `victims`, in any order."""
    gone = np.zeros(len(table), dtype=np.bool_)
    gone[victims] = True
    evict_starts, evict_stops = free.starts[gone], free.stops[gone]
    parts = _kept_parts(table, free, gone)
    keep_starts, keep_stops = _merged(table.starts[~gone], table.stops[~gone], parts)
    total = table.n_tokens
    evicted = int((evict_stops - evict_starts).sum())
    hot = total - evicted
    said = [*diagnostics, *([f"{Diagnostic.STARVED}={starved}"] if starved else [])]
    if hot > budget:
        said.append(Diagnostic.OVER_BUDGET)
    return Plan(
        budget=budget,
        total=total,
        hot=hot,
        protected=total - free.n_tokens,
        over_budget=hot > budget,
        overshoot_tokens=max(0, evicted - max(0, total - budget)),
        starved=starved,
        diagnostics=tuple(said),
        keep_starts=keep_starts,
        keep_stops=keep_stops,
        evict_ids=table.ids[gone],
        evict_starts=evict_starts,
        evict_stops=evict_stops,
        _whole=(tuple(table.blocks), ~gone),
        _parts=parts,
    )


def _kept_parts(table: BlockTable, free: Free, gone: Bools) -> tuple[Block, ...]:
    """What stays of the evicted blocks that were split: two borders, so at most a few."""
    cut = gone & ((free.starts != table.starts) | (free.stops != table.stops))
    parts: list[Block] = []
    for i in np.flatnonzero(cut).tolist():
        block, start, stop = table.blocks[i], int(free.starts[i]), int(free.stops[i])
        # The hash was of the whole block's tokens.
        if block.start < start:
            parts.append(replace(block, stop=start, token_hash=None))
        if stop < block.stop:
            parts.append(replace(block, start=stop, token_hash=None))
    return tuple(parts)


def _merged(starts: Ints, stops: Ints, parts: tuple[Block, ...]) -> tuple[Ints, Ints]:
    """Touching ranges made one; `starts` ascend, `parts` lie anywhere between."""
    if parts:
        more = np.array([(b.start, b.stop) for b in parts], dtype=np.int64)
        at = np.searchsorted(starts, more[:, 0])
        starts, stops = np.insert(starts, at, more[:, 0]), np.insert(stops, at, more[:, 1])
    if not starts.size:
        return starts, stops
    apart = np.flatnonzero(starts[1:] != stops[:-1])
    return starts[np.concatenate(([0], apart + 1))], stops[np.concatenate((apart, [starts.size - 1]))]
