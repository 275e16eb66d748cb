"""What a log says of costs: for each event the work it did and the time it took."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from kvtape.backends.modelled.work import Work, WorkKind
from kvtape.planner import layout as lay
from kvtape.planner.deferral import waits
from kvtape.planner.events import Event, Op, Way
from kvtape.planner.residency import IllegalEvent, ResidencyState, apply
from kvtape.planner.scores import is_dense
from kvtape.sim.errors import CostsError

__all__ = ["Sample", "samples_of", "works_of"]


@dataclass(frozen=True, slots=True)
class Sample:
    """`works` took `elapsed_ns` together; `seq` of the event, or of the later one for the time between two."""

    works: tuple[Work, ...]
    elapsed_ns: int
    seq: int


@dataclass(slots=True)
class _Follow:
    """What has to be known of the events before one: resident rows, rows with a pending rotation, bytes of a row."""

    resident: int = 0
    turned: int = 0
    row_bytes: int = 0

    def past(self, event: Event) -> None:
        if event.resident_tokens is not None:
            self.resident = event.resident_tokens
            if event.kv_bytes and event.resident_tokens:
                self.row_bytes = event.kv_bytes // event.resident_tokens
        if event.op == Op.SHIFT:
            self.turned += event.n_tokens or 0
        elif event.op in _SETTLES or (event.op == Op.EVICT and event.cold):
            self.turned = 0


_SETTLES = frozenset({Op.PREFILL, Op.DECODE, Op.ADMIT, Op.RECOMPUTE, Op.SNAPSHOT, Op.RESTORE, Op.SCORE})
"""Operations that read or compute, before which an engine carries out the rotations it has put off."""

_PUTS_BACK = frozenset({Op.RECOMPUTE, Op.ADMIT})

_COMPUTES: dict[Op, WorkKind] = {Op.PREFILL: "prefill", Op.DECODE: "decode", Op.RECOMPUTE: "refill"}


def samples_of(events: Iterable[Event]) -> Iterator[Sample]:
    """The samples of one session, in order. Events without a time, of imports above all, give none."""
    follow, before = _Follow(), None
    # A dense pass runs beside the session: neither its time nor the engine's state is the session's.
    everything = list(events)
    ordered = [e for e in everything if not is_dense(e)]
    behind = _rows_behind(everything)
    for event in ordered:
        works = works_of(event, follow.resident, follow.turned, follow.row_bytes, behind.get(event.seq, 0))
        if works and event.elapsed_ns is not None:
            elapsed = event.elapsed_ns
            if event.op == Op.PLAN and before is not None and before.op == Op.SCORE:
                elapsed = max(0, elapsed - (before.elapsed_ns or 0))  # a plan's time has its measuring in it
            yield Sample(works, elapsed, event.seq)
        follow.past(event)
        before = event
    yield from _between(ordered)


def _between(events: list[Event]) -> Iterator[Sample]:
    """The time from the end of one event to the beginning of the next of the same turn.

    What waits is computed when its caller asks for tokens: the time until then is the caller's.
    """
    waiting = False
    for one, two in pairwise(events):
        waiting = (waiting or waits(one)) and one.op is not Op.PREFILL
        if waiting:
            continue
        inside = one.turn == two.turn and two.op not in (Op.PROMPT, Op.GENERATE, Op.OPEN, Op.CLOSE)
        # The blocks of an evict leave before it begins, and their time is in its own.
        if inside and Op.EVICT not in (one.op, two.op) and Op.PLAN not in (one.op, two.op):
            gap = two.at_ns - one.at_ns - (one.elapsed_ns or 0)
            if gap >= 0:
                yield Sample((Work("session"),), gap, two.seq)


def _rows_behind(events: list[Event]) -> dict[int, int]:
    """By seq of a refill or an admit, the rows that stood behind its place.

    Only the fold knows; a session that puts nothing back is not folded. Raises CostsError for an illegal event.
    """
    found: dict[int, int] = {}
    last = max((i for i, e in enumerate(events) if e.op in _PUTS_BACK), default=-1)
    state = ResidencyState()
    for event in events[: last + 1]:
        if event.op in _PUTS_BACK and event.cache_start is not None:
            found[event.seq] = lay.rows_between(state.layout, event.cache_start, state.next_cache_position)
        try:
            state = apply(state, event)
        except IllegalEvent as err:
            raise CostsError(f"{err}; the log cannot be calibrated on, see kvtape verify") from None
    return found


def works_of(event: Event, resident: int, turned: int, row_bytes: int, behind: int = 0) -> tuple[Work, ...]:
    """The work of one event on `resident` rows, of which `behind` stand behind where it puts its own.

    Empty for an event that costs nothing or says too little.
    """
    n = event.n_tokens or 0
    if event.drafted_tokens is not None:
        return ()  # a run of calls for several tokens says nothing of what one token costs
    if event.op in _COMPUTES:
        return (Work(_COMPUTES[event.op], n, resident, 0, turned, behind),)
    if event.op == Op.EVICT:
        return _evict(event, resident, turned, row_bytes)
    if event.op == Op.TRUNCATE:
        return _truncate(event, resident)
    if event.op == Op.SHIFT:
        return (Work("shift", n, resident),)
    if event.op == Op.ADMIT:
        return (Work("admit", n, resident, n * row_bytes, turned, behind),)
    if event.op in (Op.SNAPSHOT, Op.RESTORE):
        kind: WorkKind = "snapshot" if event.op == Op.SNAPSHOT else "restore"
        return (Work(kind, n, resident, n * row_bytes, turned),)
    if event.op == Op.SCORE:
        queries = json.loads(event.detail or "{}").get("queries", 0) if event.reason != "accumulated" else 0
        return (Work("score", queries, resident, 0, turned),)
    if event.op == Op.PLAN:
        return (Work("plan", 0, resident),)
    return ()


def _evict(event: Event, resident: int, turned: int, row_bytes: int) -> tuple[Work, ...]:
    works: list[Work] = []
    if event.cold:
        for ref in event.blocks or ():
            n = ref.stop - ref.start
            works.append(Work("export", n, resident, n * row_bytes, turned if not works else 0))
    if event.way == Way.RECOMPUTE:
        works.append(Work("rebuild", event.physical_prefill_tokens or 0))
    else:
        works.append(Work("evict", event.n_tokens or 0, resident))
    return tuple(works)


def _truncate(event: Event, resident: int) -> tuple[Work, ...]:
    if event.way == Way.RECOMPUTE:
        return (Work("rebuild", event.physical_prefill_tokens or 0),)
    gone = resident - (event.resident_tokens if event.resident_tokens is not None else resident)
    return (Work("truncate", gone, resident),) if gone > 0 else ()
