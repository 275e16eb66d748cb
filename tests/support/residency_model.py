"""A session's residency as a child would keep it: a list of tape positions and a dict from tape to cache."""

from __future__ import annotations

import copy
import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any

from kvtape.planner.events import BlockRef, Event, Op


@dataclass
class Cold:
    start: int
    stop: int
    cache_start: int


@dataclass
class Model:
    n_ctx: int
    tape: list[int] = field(default_factory=list)
    """The tape's tokens: numbers that never recur, so that a position re-used by another token shows."""
    cache: dict[int, int] = field(default_factory=dict)
    cold: dict[int, Cold] = field(default_factory=dict)
    snapshots: dict[int, Model] = field(default_factory=dict)
    generation: int = 0
    turn: int = 0
    prefix: int = 0
    seq: int = 0
    token: int = 0
    block: int = 0

    @property
    def next_row(self) -> int:
        return max(self.cache.values(), default=-1) + 1

    @property
    def room(self) -> int:
        return self.n_ctx - len(self.cache)

    def runs(self) -> list[tuple[int, int]]:
        """Maximal `[start, stop)` that are contiguous in tape and cache."""
        return _runs(self.cache)

    def holes(self) -> list[tuple[int, int]]:
        """Maximal tape ranges that are not resident."""
        return _positions(p for p in range(len(self.tape)) if p not in self.cache)

    def extend(self, n: int) -> None:
        at = self.next_row
        for i in range(n):
            self.cache[len(self.tape)] = at + i
            self.tape.append(self.token)
            self.token += 1

    def drop(self, start: int, stop: int) -> None:
        self.cache = {t: c for t, c in self.cache.items() if not start <= t < stop}

    def rank(self) -> None:
        self.cache = {t: i for i, t in enumerate(sorted(self.cache))}

    def move(self, start: int, stop: int, delta: int) -> None:
        self.cache = {t: c + delta if start <= c < stop else c for t, c in self.cache.items()}

    def cut(self, at: int) -> None:
        self.drop(at, len(self.tape))
        del self.tape[at:]
        self.cold = {i: c for i, c in self.cold.items() if c.stop <= at}
        self.generation += 1

    def save(self, snapshot_id: int) -> None:
        self.snapshots[snapshot_id] = copy.deepcopy(self)

    def load(self, snapshot_id: int) -> None:
        saved = self.snapshots[snapshot_id]
        self.tape, self.cache, self.prefix = list(saved.tape), dict(saved.cache), saved.prefix
        # A blob that has left the cold store since is gone; one that came and went lies where it last stood.
        self.cold = {i: c for i, c in self.cold.items() if i in saved.cold}
        self.generation += 1

    def place(self, start: int, stop: int) -> int | None:
        """A cache position where `[start, stop)` fits between its tape neighbours, None without one."""
        below = max((t for t in self.cache if t < start), default=None)
        above = min((t for t in self.cache if t >= stop), default=None)
        at = 0 if below is None else self.cache[below] + 1
        if above is not None and self.cache[above] - at < stop - start:
            return None
        wanted = set(range(at, at + stop - start))
        return None if wanted & set(self.cache.values()) else at

    def event(self, op: Op, **columns: Any) -> Event:
        """The next event with this op, the state after it recorded; call when the model has already changed."""
        recorded = {
            "resident_tokens": len(self.cache),
            "resident_digest": digest(v for start, stop in _positions(self.cache) for v in (start, stop)),
            "layout_digest": digest(
                v
                for start, stop in sorted(self.runs(), key=lambda r: self.cache[r[0]])
                for v in (start, stop - start, self.cache[start])
            ),
        }
        return Event(
            run_id="r",
            session_id="s",
            seq=self.seq,
            at_ns=0,
            op=op,
            turn=self.turn,
            generation=self.generation,
            **(recorded | columns),
        )


def digest(values: Any) -> int:
    numbers = list(values)
    return int.from_bytes(hashlib.blake2b(struct.pack(f"<{len(numbers)}Q", *numbers), digest_size=8).digest(), "little")


def cut_refs(first_id: int, start: int, stop: int, at: int) -> tuple[BlockRef, ...]:
    """`[start, stop)` as two blocks, cut `at` tokens in, or as one."""
    if 0 < at < stop - start:
        return (BlockRef(first_id, start, start + at), BlockRef(first_id + 1, start + at, stop))
    return (BlockRef(first_id, start, stop),)


def _positions(found: Any) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for p in sorted(found):
        if out and out[-1][1] == p:
            out[-1] = (out[-1][0], p + 1)
        else:
            out.append((p, p + 1))
    return out


def _runs(rows: dict[int, int]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for tape in sorted(rows):
        if out and out[-1][1] == tape and rows[tape - 1] + 1 == rows[tape]:
            out[-1] = (out[-1][0], tape + 1)
        else:
            out.append((tape, tape + 1))
    return out
