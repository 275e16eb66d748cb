"""What a new prompt has in common with the tape, and whether it can go through at all: looked at before any step."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvtape.backends.catalog import SegmentKind, Stretch
from kvtape.backends.errors import ContextOverflow, InputRejected
from kvtape.backends.parts import Parts
from kvtape.planner.blocks import CacheClass, PromptSegment, segments_to_blocks
from kvtape.planner.ranges import RangeSet

__all__ = [
    "Hole",
    "Reuse",
    "as_segments",
    "check_tokens",
    "common_prefix",
    "plan_reuse",
    "refuse_overflow",
    "stretches",
]


@dataclass(frozen=True, slots=True)
class Hole:
    """A stretch below the common prefix to put back: from the cold store, or (block_id None) computed again."""

    start: int
    stop: int
    block_id: int | None


@dataclass(frozen=True, slots=True)
class Reuse:
    """Keep the tape up to `keep`, fill `holes` first; `reason` says why the rest of the tape goes."""

    keep: int
    holes: tuple[Hole, ...]
    reason: str


def as_segments(prompt: Sequence[int] | Sequence[PromptSegment]) -> list[PromptSegment]:
    """The segments to compute, one after another; plain tokens are one user segment.

    One that was not tokenised is left out, or raises MissingRanges when it has to be there. Raises InputRejected for
    bounds that are not where the segment's tokens come to lie, and for bounds without tokens.
    """
    segments = [p for p in prompt if isinstance(p, PromptSegment)]
    if not segments:
        return [PromptSegment(kind="user", tokens=tuple(prompt))]  # type: ignore[arg-type]
    if len(segments) != len(prompt):
        raise InputRejected("a prompt is tokens or segments, not both")
    segments_to_blocks(segments)
    at, there = 0, []
    for i, s in enumerate(segments):
        if s.bounds is not None and (s.tokens is None or s.bounds.start != at):
            raise InputRejected(f"segment {i} ({s.kind}) has bounds {s.bounds}; give its tokens, which begin at {at}")
        if s.tokens is not None:
            there.append(s)
        at += len(s.tokens or ())
    return there


def stretches(segments: Sequence[PromptSegment], at: int) -> list[Stretch]:
    """The segments laid on the tape from position `at`."""
    out: list[Stretch] = []
    for s in segments:
        stop = at + len(s.tokens or ())
        out.append(Stretch(at, stop, SegmentKind(s.kind, s.effective_class)))
        at = stop
    return out


def common_prefix(tape: Sequence[int], tokens: Sequence[int]) -> int:
    n = min(len(tape), len(tokens))
    return next((i for i in range(n) if tape[i] != tokens[i]), n)


def check_tokens(parts: Parts, tokens: Iterable[int]) -> list[int]:
    """The ids as plain integers. Raises InputRejected for what is none, or none of this vocabulary."""
    n_vocab = parts.backend.facts.n_vocab
    given, checked = list(tokens), list[int]()
    if set(map(type, given)) == {int} and min(given) >= 0 and max(given) < n_vocab:
        return given  # a prompt of ten thousand tokens is looked at in C
    for i, token in enumerate(given):
        if isinstance(token, bool) or not hasattr(token, "__index__"):
            raise InputRejected(f"token {i} is {token!r}, which is no integer")
        if not 0 <= token < n_vocab:
            raise InputRejected(f"token {i} is {token}, the vocabulary has ids 0 to {n_vocab - 1}")
        checked.append(operator.index(token))
    if not checked:
        raise InputRejected("an empty prompt: give at least one token")
    return checked


def plan_reuse(parts: Parts, tokens: Sequence[int], need_logits: bool) -> Reuse:
    """How far the tape can be kept, and which holes must be filled for it.

    With `need_logits` the last token is always computed, so an identical prompt keeps all but that one. What waits to
    be computed counts as on the tape, and is no hole.
    """
    common = common_prefix([*parts.tape, *parts.pending.tokens] if parts.pending else parts.tape, tokens)
    keep = min(common, len(tokens) - 1) if need_logits else common
    reason = "diverged" if common < len(tokens) else "shorter" if keep == common else "logits"
    if parts.policy.hole == "forget":
        return Reuse(keep, (), reason)
    # Without surgery a hole in the middle has no place to be computed into: the reuse ends there.
    can_refill = parts.capabilities.recompute_range and parts.capabilities.remove_middle
    holes: list[Hole] = []
    free = parts.n_ctx - (parts.state.resident & RangeSet([(0, keep)])).n_tokens
    for gap in RangeSet([(0, min(keep, len(parts.tape)))]) - parts.state.resident:
        for block in parts.catalog.inside(gap.start, gap.stop):
            start, stop = max(block.start, gap.start), min(block.stop, gap.stop)
            cold = parts.state.cold_block(block.block_id)
            # A cold block that the cut goes through is of no use: the truncation drops it.
            whole = cold is not None and cold.stop <= keep
            free -= stop - start
            if free < 1 or not (whole or can_refill):
                return Reuse(start, tuple(holes), "hole")
            holes.append(Hole(start, stop, block.block_id if whole else None))
    return Reuse(keep, tuple(holes), reason)


def refuse_overflow(parts: Parts, reused_to: int, incoming: int, laid: Sequence[Stretch]) -> None:
    """Refuse, before anything is touched, a prompt that cannot go through."""
    if not parts.policy.evicts:
        resident = (parts.state.resident & RangeSet([(0, reused_to)])).n_tokens
        holes = reused_to - resident if parts.policy.hole == "refill" else 0
        if resident + holes + incoming > parts.n_ctx:
            raise ContextOverflow(resident + holes + incoming, parts.n_ctx, "policy none never evicts")
        return
    kept = (b for b in parts.catalog.inside(0, reused_to) if b.protected and b.start in parts.state.resident)
    fresh = (s for s in laid if s.kind.cache_class is CacheClass.TASK_PINNED)
    pinned = sum(min(b.stop, reused_to) - b.start for b in kept)
    pinned += sum(max(0, s.stop - max(s.start, reused_to)) for s in fresh)
    least = pinned + parts.policy.recent + 1
    if least > parts.n_ctx:
        raise ContextOverflow(least, parts.n_ctx, f"{pinned} pinned tokens and the recent span are never evicted")
