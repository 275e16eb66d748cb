"""`ResidencyState`: what a session holds after some prefix of its events. Immutable; the rules make new ones."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from kvtape.planner import layout as lay
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet

__all__ = ["UNBOUNDED", "ColdBlock", "ResidencyState", "SavedState", "changed"]

UNBOUNDED = 2**62
"""`n_ctx` of a session whose context is not known: no number of tokens comes near it."""


@dataclass(frozen=True, slots=True)
class ColdBlock:
    """A block in the cold store: its tape range and the cache position its first row had when it left."""

    block_id: int
    start: int
    stop: int
    cache_start: int


@dataclass(frozen=True, slots=True)
class SavedState:
    """What a snapshot brings back."""

    tape_length: int
    prefix_length: int
    layout: Layout
    cold: tuple[ColdBlock, ...]


@dataclass(frozen=True, slots=True)
class ResidencyState:
    """What is resident, cold and gone after some prefix of a session's events. All lengths in tokens.

    `offered`: where the last prompt ends on the tape, whether or not all of it was computed.
    """

    next_seq: int = 0
    turn: int = 0
    tape_length: int = 0
    generation: int = 0
    prefix_length: int = 0
    offered: int = 0
    n_ctx: int = 0
    layout: Layout = ()
    cold: tuple[ColdBlock, ...] = ()
    snapshots: tuple[tuple[int, SavedState], ...] = field(default=(), repr=False)
    opened: bool = False
    closed: bool = False
    lost: bool = False
    fatal: str | None = None

    @property
    def resident(self) -> RangeSet:
        return lay.resident_ranges(self.layout)

    @property
    def resident_tokens(self) -> int:
        return sum(s.length for s in self.layout)

    @property
    def cold_ranges(self) -> RangeSet:
        return RangeSet((b.start, b.stop) for b in self.cold)

    @property
    def dropped(self) -> RangeSet:
        """Tape positions that are neither resident nor cold: only the tape still knows them."""
        return RangeSet([(0, self.tape_length)]) - self.resident - self.cold_ranges

    @property
    def next_cache_position(self) -> int:
        return lay.next_cache_position(self.layout)

    def cold_block(self, block_id: int) -> ColdBlock | None:
        return next((b for b in self.cold if b.block_id == block_id), None)

    def snapshot_ids(self) -> tuple[int, ...]:
        return tuple(i for i, _ in self.snapshots)


_NAMES = tuple(f.name for f in fields(ResidencyState))
_KNOWN = frozenset(_NAMES)


def changed(state: ResidencyState, **changes: Any) -> ResidencyState:
    """`dataclasses.replace` for states, in a quarter of the time: a fold makes two states an event.

    Raises TypeError for a name that is no field.
    """
    if not changes.keys() <= _KNOWN:
        raise TypeError(f"no field {', '.join(sorted(changes.keys() - _KNOWN))} in ResidencyState")
    new = object.__new__(ResidencyState)
    for name in _NAMES:
        object.__setattr__(new, name, changes[name] if name in changes else getattr(state, name))
    return new
