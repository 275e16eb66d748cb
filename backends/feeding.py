"""Computing: tokens into the cache in pieces, with room made between them, each piece an event."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from kvtape.backends import room
from kvtape.backends.catalog import SegmentKind, Stretch
from kvtape.backends.parts import Parts
from kvtape.backends.pending import Offer
from kvtape.backends.protocol import Choose, DecodeRun, Logits
from kvtape.backends.speculation.deciding import speculate
from kvtape.backends.speculation.drafter import Drafter
from kvtape.backends.verifying import Verifier
from kvtape.planner.blocks import Block, default_class
from kvtape.planner.events import Op

__all__ = ["DECODE_RUN_TOKENS", "compute_piece", "decode_run", "feed"]

DECODE_RUN_TOKENS = 32
"""An executed decode run is recorded at the latest after so many tokens: a kill loses at most the open run."""


def feed(
    parts: Parts, tokens: list[int], stretches: Sequence[Stretch], start: int, counters: dict[str, Any]
) -> Generator[None]:
    """Prefill `tokens` from tape position `start` in pieces, planning between them; pauses before each but the first.

    The first piece's event bears the turn's counters.
    """
    offer = Offer(start, start, tuple(tokens), tuple(stretches))
    done = 0
    while done < len(tokens):
        if done:
            yield
        n = room.make_room(parts, min(parts.backend.config.chunk, len(tokens) - done))
        compute_piece(parts, tokens[done : done + n], (offer,), counters)
        counters = {}
        done += n


def compute_piece(parts: Parts, piece: list[int], offers: Sequence[Offer], counters: dict[str, Any]) -> None:
    """Prefill `piece` at the tape's end, for which there is room; its event bears `counters`.

    `offers`, in tape order, say what its tokens are.
    """
    start, began, cache_start = len(parts.tape), parts.now(), parts.state.next_cache_position
    result = parts.backend.prefill(piece, start)
    elapsed = parts.now() - began
    parts.tape.extend(piece)
    blocks: list[Block] = []
    for o in offers:
        stop = min(o.stop, len(parts.tape))
        blocks += parts.catalog.grow(o.stretches, stop, op_start=o.origin, clock=parts.state.turn)
    parts.journal.emit(
        Op.PREFILL,
        began,
        tokens=piece,
        block_rows=parts.journal.block_rows(blocks),
        start=start,
        stop=start + len(piece),
        n_tokens=len(piece),
        cache_start=cache_start,
        physical_prefill_calls=result.calls,
        physical_prefill_tokens=result.tokens,
        token_count_source=_source(result.counted),
        elapsed_ns=elapsed,
        kv_bytes=parts.resident_bytes(),
        **counters,
    )
    parts.tokens_since_plan += len(piece)
    parts.logits, parts.probed = result.logits, None


def decode_run(parts: Parts, wanted: int, choose: Choose, drafter: Drafter | None = None) -> tuple[int, ...]:
    """One uninterrupted run: at most DECODE_RUN_TOKENS, and not past the next plan; drafts stay within it."""
    room.make_room(parts, 1)
    n = min(wanted, DECODE_RUN_TOKENS, room.rows_before_plan(parts))
    assert parts.logits is not None
    start, began, cache_start = len(parts.tape), parts.now(), parts.state.next_cache_position
    drafts: dict[str, Any] = {}
    if drafter is None:
        run = parts.backend.decode_until(n, parts.n_ctx, start, parts.logits, choose)
    else:
        run, drafts = _speculated(parts, drafter, n, parts.logits, choose)
    elapsed = parts.now() - began
    if not run.tokens:
        return ()
    parts.tape.extend(run.tokens)
    kind = SegmentKind("assistant", default_class("assistant"))
    # A block that was evicted does not grow: its new tokens are resident, the old ones are not.
    after_resident = start - 1 in parts.state.resident
    blocks = parts.catalog.extend(len(run.tokens), kind, new_segment=not after_resident, clock=parts.state.turn)
    parts.journal.emit(
        Op.DECODE,
        began,
        tokens=run.tokens,
        block_rows=parts.journal.block_rows(blocks),
        start=start,
        stop=start + len(run.tokens),
        n_tokens=len(run.tokens),
        cache_start=cache_start,
        completion_tokens=len(run.tokens),
        token_count_source=_source(run.counted),
        decode_calls=run.calls,
        **drafts,
        elapsed_ns=elapsed,
        kv_bytes=parts.resident_bytes(),
    )
    parts.tokens_since_plan += len(run.tokens)
    parts.logits, parts.probed = run.logits, None
    return run.tokens


def _speculated(
    parts: Parts, drafter: Drafter, n: int, logits: Logits, choose: Choose
) -> tuple[DecodeRun, dict[str, Any]]:
    """A run with drafts, and its counters; none where nothing was drafted."""
    assert isinstance(parts.backend, Verifier), "looked at when the session opened"
    found = speculate(parts.backend, parts.backend, drafter, parts.tape, n, logits, choose)
    if not found.drafted:
        return found.run, {}
    rejected = found.drafted - found.accepted
    counters = {"drafted_tokens": found.drafted, "accepted_tokens": found.accepted, "rejected_tokens": rejected}
    return found.run, counters


def _source(counted: bool) -> str:
    return "engine" if counted else "fallback"
