"""The steps of the cold store: blocks leave with the rows of an evict, and come back only as what they were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.cold_identity import BlockIdentity
from kvtape.backends.cold_store import ColdEntry
from kvtape.backends.errors import StateRejected, UnknownBlock
from kvtape.backends.parts import Parts
from kvtape.planner.blocks import Block
from kvtape.planner.events import Op
from kvtape.planner.ranges import RangeSet

__all__ = ["Exported", "check", "drop_damaged", "export", "forget_invalid", "store"]


@dataclass(frozen=True, slots=True)
class Exported:
    entry: ColdEntry
    elapsed_ns: int


def export(parts: Parts, wanted: RangeSet) -> dict[int, Exported]:
    """Copy the blocks of `wanted` out; a block that can never fit in the store is refused."""
    exported: dict[int, Exported] = {}
    if parts.cold is None or not parts.capabilities.cold_store:
        return exported
    for block in parts.catalog.resident(wanted):
        began = parts.now()
        fits = not parts.cold.too_large(block.n_tokens, 0)
        blob = parts.backend.export_block(block.start, block.stop) if fits else b""
        if not fits or parts.cold.too_large(block.n_tokens, len(blob)):
            _refuse_cold(parts, block)
            continue
        identity = BlockIdentity.of(parts.backend, parts.tape[block.start : block.stop], blob)
        entry = ColdEntry(block.block_id, block.start, block.stop, block.cache_class, block.last_used, blob, identity)
        exported[block.block_id] = Exported(entry, parts.now() - began)
    return exported


def _refuse_cold(parts: Parts, block: Block) -> None:
    parts.journal.emit(
        Op.REFUSE,
        parts.now(),
        block_id=block.block_id,
        start=block.start,
        stop=block.stop,
        n_tokens=block.n_tokens,
        error_class="ColdStoreTooSmall",
        reason="cold_store: the block is larger than the whole budget",
    )


def store(parts: Parts, entries: Sequence[ColdEntry]) -> None:
    """Put what was exported into the cold store, and say what had to leave it."""
    assert parts.cold is not None
    for entry in entries:
        parts.cold.put(entry)
        for block_id in parts.cold.trim(entry.block_id):
            _trimmed(parts, block_id, "cold_budget")


def _trimmed(parts: Parts, block_id: int, reason: str) -> None:
    block = parts.state.cold_block(block_id)
    assert block is not None, f"block {block_id} is in the cold store but not in the fold"
    parts.journal.emit(
        Op.TRIM,
        parts.now(),
        block_id=block_id,
        start=block.start,
        stop=block.stop,
        n_tokens=block.stop - block.start,
        reason=reason,
    )


def check(parts: Parts, block_id: int) -> ColdEntry:
    """The entry, which still is what it was when it left. Raises UnknownBlock, StateRejected."""
    entry = parts.cold.get(block_id) if parts.cold is not None else None
    if entry is None or parts.state.cold_block(block_id) is None:
        known = ", ".join(str(b.block_id) for b in parts.state.cold[:8]) or "none"
        raise UnknownBlock(f"block {block_id} is not in the cold store (cold blocks: {known})")
    now = BlockIdentity.of(parts.backend, parts.tape[entry.start : entry.stop], entry.blob)
    entry.identity.require(now, block_id)
    return entry


def drop_damaged(parts: Parts, tape_stop: int) -> None:
    """Give up cold blocks before `tape_stop` that are not what they were; each is a refusal and a trim.

    So that a hole is filled another way instead of ending every turn.
    """
    for block in parts.state.cold:
        if block.stop > tape_stop:
            continue
        try:
            check(parts, block.block_id)
        except StateRejected as err:
            error, reason = type(err).__name__, f"admit: {err}"
            parts.journal.emit(Op.REFUSE, parts.now(), block_id=block.block_id, error_class=error, reason=reason)
            assert parts.cold is not None
            parts.cold.pop(block.block_id)
            _trimmed(parts, block.block_id, "damaged")


def forget_invalid(parts: Parts) -> None:
    """Drop the blobs of blocks that the fold no longer counts as cold."""
    if parts.cold is not None:
        parts.cold.keep_only([b.block_id for b in parts.state.cold])
