"""Requests one after another on one worker: who waits, what each finds in the pool, and how long it takes.

First come, first served. A request begins when a slot is free and the pool has room for its prompt and its answer;
until then all behind it wait. It computes what the pool does not hold, at least its last token, at the calibrated
speed, whatever the others do; its blocks can be shared from its beginning on. A block is the same behind the same
blocks only. Nothing happens between two beginnings but ends, and beginnings never go back in time, so that one pass
over the requests in the order of their arrival is the whole simulation.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from kvtape.sim.blocks.block_trace import Ints, Requests
from kvtape.sim.blocks.identity import by_first_use, path_codes
from kvtape.sim.costs.model import CostTable
from kvtape.sim.costs.pieces import in_pieces
from kvtape.sim.errors import SimulationError
from kvtape.sim.fleet.pool import BlockPool
from kvtape.sim.modelled_time import at_pace, check_time

__all__ = ["UNSERVED", "Fleet", "Served", "serve"]

_SHOWN = 1000
"""Requests between two looks at the progress."""

UNSERVED = -1
"""In place of a request's beginning: it needs more blocks than the pool has."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """`pool_blocks` of the trace's size; `slots` requests at once, None for as many as fit the pool.

    `chunk`: tokens of one prefill call. `pace`: arrivals so many times as fast as recorded.
    """

    pool_blocks: int
    slots: int | None = None
    chunk: int = 512
    pace: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("pool_blocks", self.pool_blocks), ("slots", self.slots), ("chunk", self.chunk)):
            if value is not None and value < 1:
                raise SimulationError(f"{name}={value}: give at least 1")
        at_pace(self.pace)


@dataclass(frozen=True, slots=True)
class Served:
    """All int64 [requests], in order of arrival; ns on the simulated clock, whose 0 is the first arrival.

    `began` is UNSERVED for a request that the pool cannot hold; its other times are then its arrival's. `reused`:
    prompt tokens that were in the pool.
    """

    arrived: Ints
    began: Ints
    prompted: Ints
    ended: Ints
    reused: Ints
    evicted: int
    peak_blocks: int


def serve(
    requests: Requests, fleet: Fleet, costs: CostTable, *, progress: Callable[[int, int], None] | None = None
) -> Served:
    """Raises CostsError where the costs say nothing of prefill or decode, SimulationError for times past all logs."""
    trace, worker = requests.trace, _Worker(fleet)
    blocks_of, starts = path_codes(by_first_use(trace.ids), trace.starts), trace.starts.tolist()
    prefill, decode = in_pieces(costs, "prefill", fleet.chunk), in_pieces(costs, "decode", None)
    came, paced = requests.at_ns - requests.at_ns[0], at_pace(fleet.pace)
    arrived = came if fleet.pace == 1 else np.array([paced(ns) for ns in came.tolist()], np.int64)
    columns = began, prompted, ended, reused = array("q"), array("q"), array("q"), array("q")
    rows = zip(arrived.tolist(), requests.prompts.tolist(), requests.outputs.tolist(), strict=True)
    for i, (at, n, output) in enumerate(rows):
        blocks = blocks_of[starts[i] : starts[i + 1]].tolist()
        answer = max(0, -(-(n + output) // trace.block_tokens) - len(blocks))
        found = worker.begin(at, blocks, answer)
        if found is None:
            for column, value in zip(columns, (UNSERVED, at, at, 0), strict=True):
                column.append(value)
            continue
        known = min(found * trace.block_tokens, max(0, n - 1))
        first = worker.now + prefill(n - known, known)
        end = first + (decode(output, n) if output else 0)
        check_time(end)
        worker.end_at(end, blocks, answer)
        began.append(worker.now)
        prompted.append(first)
        ended.append(end)
        reused.append(known)
        if progress is not None and i % _SHOWN == 0:
            progress(i, len(arrived))
    times = [np.array(column, np.int64) for column in columns]
    return Served(arrived, times[0], times[1], times[2], times[3], worker.pool.evicted, worker.peak)


class _Worker:
    """`now`: when the last request began."""

    def __init__(self, fleet: Fleet) -> None:
        self.pool = BlockPool(fleet.pool_blocks)
        self.now = self.peak = 0
        self._slots = fleet.slots
        self._running: list[tuple[int, int, list[int], int]] = []
        self._serial = 0

    def begin(self, at: int, blocks: list[int], answer: int) -> int | None:
        """Move on to when there is a slot and room. How many blocks were there; None: there never is room."""
        pool, running = self.pool, self._running
        if len(blocks) + answer > pool.size and len(set(blocks)) + answer > pool.size:
            return None
        self.now = max(self.now, at)
        while running and running[0][0] <= self.now:
            self._end()
        found = self._acquired(blocks, answer)
        while found is None:
            self.now = self._end()
            found = self._acquired(blocks, answer)
        self.peak = max(self.peak, pool.in_use)
        return found

    def end_at(self, end: int, blocks: list[int], answer: int) -> None:
        """The one that has begun; of those that end at once the first that came ends first."""
        heappush(self._running, (end, self._serial, blocks, answer))
        self._serial += 1

    def _acquired(self, blocks: list[int], answer: int) -> int | None:
        full = self._slots is not None and len(self._running) >= self._slots
        return None if full else self.pool.acquire(blocks, answer)

    def _end(self) -> int:
        end, _, blocks, answer = heappop(self._running)
        self.pool.release(blocks, answer)
        return end
