"""Where in a session the logits are compared: the places are chosen from the log alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvtape.planner.events import Event, Op

__all__ = ["CHECKPOINTS_WANTED", "Checkpoint", "plan_checkpoints"]

CHECKPOINTS_WANTED = 20
Checkpoint = tuple[int, int]
"""(seq, k): the logits after the first k tokens of the prefill or decode event `seq`."""


def plan_checkpoints(events: Sequence[Event], wanted: int = CHECKPOINTS_WANTED) -> frozenset[Checkpoint]:
    """At least `wanted` checkpoints, or every executed token where there are fewer.

    The first query after the first and after the last evict is always among them; the others are spread evenly over
    the places that cost nothing (ends of prefills, every decoded token), and, where those are too few, over all
    executed tokens: a prefill is then cut there.
    """
    computed = [(e.seq, k) for e in events if e.op in (Op.PREFILL, Op.DECODE) for k in range(1, _length(e) + 1)]
    ends = {(e.seq, _length(e)) for e in events if e.op == Op.PREFILL}
    decodes = {e.seq for e in events if e.op == Op.DECODE}
    free = [c for c in computed if c in ends or c[0] in decodes]
    chosen = _after_evicts(events) | set(_spread(free, wanted))
    rest = [c for c in computed if c not in chosen]
    chosen |= set(_spread(rest, wanted - len(chosen)))
    return frozenset(chosen)


def _length(event: Event) -> int:
    return (event.stop or 0) - (event.start or 0)


def _after_evicts(events: Sequence[Event]) -> set[Checkpoint]:
    evicts = [i for i, e in enumerate(events) if e.op == Op.EVICT]
    firsts: set[Checkpoint] = set()
    for i in evicts[:1] + evicts[-1:]:
        query = next((e for e in events[i:] if e.op in (Op.PREFILL, Op.DECODE)), None)
        if query is not None:
            firsts.add((query.seq, 1))
    return firsts


def _spread(places: list[Checkpoint], n: int) -> list[Checkpoint]:
    """At most `n` of `places`, evenly, the last one among them."""
    if n <= 0 or not places:
        return []
    picks = np.unique(np.linspace(len(places) - 1, 0, min(n, len(places))).round().astype(np.int64))
    return [places[int(i)] for i in picks]
