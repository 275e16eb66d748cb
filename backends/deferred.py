"""Deferred prefill: prompts wait on the tape, and are computed together by the decode that needs them.

What a session keeps and evicts is what it would be without: room is made at the borders at which an eager session
makes it, and only what lies between two decisions is computed in one call. What is saved are calls: the rest of a
prefix and the suffixes behind it go through the engine in full chunks, and what is replaced before anything is
generated is never computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvtape.backends import prefix, room
from kvtape.backends.catalog import Stretch
from kvtape.backends.errors import Cancelled, EngineFault, FatalClass, UsageError
from kvtape.backends.feeding import compute_piece
from kvtape.backends.parts import Parts
from kvtape.backends.pending import Offer, clipped
from kvtape.planner.blocks import BlockError
from kvtape.planner.plan import PlanError
from kvtape.planner.specs import SpecError
from kvtape.traces.errors import LogWriteFailed

__all__ = ["flush", "kept_on_refusal", "offer", "refuse_overflow"]

_TYPED = (UsageError, Cancelled, EngineFault, BlockError, PlanError, SpecError, LogWriteFailed)


def offer(parts: Parts, start: int, tokens: Sequence[int], stretches: Sequence[Stretch]) -> None:
    """Put `tokens` on the tape from `start`, its end, on; nothing is computed."""
    if tokens:
        parts.pending.add(Offer(start, start, tuple(tokens), tuple(stretches)))
        parts.logits = None


def refuse_overflow(parts: Parts, keep: int, incoming: int, laid: Sequence[Stretch]) -> None:
    """Refuse, before anything is touched, what cannot go through behind the first `keep` tokens of the tape.

    What waits below `keep` has to go through too. Raises ContextOverflow where it is known already; what only a plan
    can tell is refused by the call that computes.
    """
    computed = min(keep, len(parts.tape))
    stop = keep + incoming
    waiting = clipped(parts.pending.laid(), computed, keep)
    prefix.refuse_overflow(parts, computed, stop - computed, [*waiting, *clipped(laid, keep, stop)])
    room.refuse_positions(parts, computed, stop - computed)


def flush(parts: Parts, *, folded: bool) -> None:
    """Compute what waits. `folded`: a decode does it, and its events bear the deferred counters.

    Raises what computing raises; a failure that is no typed one is an EngineFault, prefill_failed, as it is without
    deferral. What went in is then no longer among what waits.
    """
    try:
        _flush(parts, folded)
    except _TYPED:
        raise
    except Exception as err:
        raise EngineFault(FatalClass.PREFILL_FAILED, repr(err)) from err


@contextmanager
def kept_on_refusal(parts: Parts) -> Iterator[None]:
    """Around a flush and its rolling back: whatever of the offers is not on the computed tape then waits again."""
    offers = parts.pending.offers
    try:
        yield
    except Exception:
        parts.pending.behind(offers, len(parts.tape))
        raise


def _flush(parts: Parts, folded: bool) -> None:
    """Pieces are those of an eager session; `ahead` tokens of them need no decision before they are computed."""
    chunk, ahead = parts.backend.config.chunk, 0
    for waiting in parts.pending.offers:
        left = len(waiting.tokens)
        while left:
            piece = min(chunk, left)
            if not room.fits(parts, ahead, piece):
                _compute(parts, ahead, folded)
                ahead, piece = 0, room.make_room(parts, piece)
            ahead, left = ahead + piece, left - piece
    _compute(parts, ahead, folded)


def _compute(parts: Parts, n: int, folded: bool) -> None:
    """Compute the first `n` tokens that wait, in full chunks, each piece an event."""
    while n:
        offers, start = parts.pending.offers, len(parts.tape)
        size = min(n, parts.backend.config.chunk)
        piece = list(parts.pending.tokens[:size])
        stop = start + size
        counters: dict[str, Any] = {}
        if folded:
            ended = sum(start < o.stop <= stop for o in offers)
            counters = {"deferred_prefill_tokens": size, "deferred_prefill_calls": ended}
        compute_piece(parts, piece, offers, counters)
        parts.pending.behind(offers, stop)
        n -= size
