"""How many events a second the residency fold takes. One JSON line per kind of log; exit 1 when the promise is missed.

    python benchmarks/bench_fold.py [--events N]

columns_per_s   `fold_columns` over columns as a log holds them
apply_per_s     `apply`, one event after the other: the baseline, and the same state in the end

decoding   one event a decoded token, a plan and an eviction of 512 tokens whenever the context is full
chat       turns of prompt, prefill, generate and 4 decode events of 32 tokens, with the same evictions
streaming  a full window that slides: every token is a plan, an eviction of one token, and a decode
rebased    the same, and each eviction moves the rows behind it: a fourth event a token

Times are CPU time: one thread computes, and a busy machine does not show.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kvtape.planner.event_columns import EventColumns
from kvtape.planner.events import Event, Op, Way
from kvtape.planner.fold_columns import fold_columns
from kvtape.planner.residency import ResidencyState, apply

N_CTX = 4096
SINK = 4
LIMIT_PER_S = 500_000


@dataclass
class Log:
    """Makes legal events of a session whose cache has gaps."""

    events: list[Event] = field(default_factory=list)
    tape: int = 0
    resident: int = 0
    first: int = SINK
    turn: int = 0

    def add(self, op: Op, **columns: Any) -> None:
        self.events.append(
            Event(
                run_id="r",
                session_id="s",
                seq=len(self.events),
                at_ns=0,
                op=op,
                turn=self.turn,
                generation=0,
                **columns,
            )
        )

    def extend(self, op: Op, n: int, drop: int) -> None:
        """`n` more tokens; when they do not fit, `drop` tokens behind the sinks go first."""
        if self.resident + n > N_CTX:
            self.add(Op.PLAN)
            self.add(Op.EVICT, start=self.first, stop=self.first + drop, way=Way.GAP)
            self.first += drop
            self.resident -= drop
        self.add(op, start=self.tape, stop=self.tape + n, n_tokens=n, cache_start=self.tape)
        self.tape += n
        self.resident += n


def decoding(log: Log) -> None:
    log.extend(Op.DECODE, 1, 512)


def chat(log: Log) -> None:
    log.turn += 1
    log.add(Op.PROMPT, start=log.tape, n_tokens=log.tape + 100)
    log.extend(Op.PREFILL, 100, 512)
    log.add(Op.GENERATE)
    for _ in range(4):
        log.extend(Op.DECODE, 32, 512)


def streaming(log: Log) -> None:
    log.extend(Op.DECODE, 1, 1)


def rebased(log: Log) -> None:
    """Cache positions stay in the window: its rows are [0, resident), whatever they are called on the tape."""
    if log.resident == N_CTX:
        log.add(Op.PLAN)
        log.add(Op.EVICT, start=log.first, stop=log.first + 1, cache_start=SINK, way=Way.REBASED)
        log.add(Op.SHIFT, start=SINK + 1, stop=N_CTX, n_tokens=N_CTX - SINK - 1, delta=-1)
        log.first += 1
        log.resident -= 1
    log.add(Op.DECODE, start=log.tape, stop=log.tape + 1, n_tokens=1, cache_start=log.resident)
    log.tape += 1
    log.resident += 1


def made(step: Callable[[Log], None], n: int) -> list[Event]:
    log = Log()
    log.add(Op.OPEN, n_tokens=N_CTX)
    while len(log.events) < n:
        step(log)
    return log.events


def timed(action: Callable[[], ResidencyState]) -> tuple[float, ResidencyState]:
    began = time.process_time()
    state = action()
    return time.process_time() - began, state


def one_by_one(events: list[Event]) -> ResidencyState:
    state = ResidencyState()
    for event in events:
        state = apply(state, event)
    return state


def measure(events: int) -> Iterator[dict[str, object]]:
    for step in (decoding, chat, streaming, rebased):
        log = made(step, events)
        columns = EventColumns.of(log)
        seconds, state = min((timed(lambda c=columns: fold_columns(c)) for _ in range(5)), key=lambda t: t[0])  # type: ignore[misc]
        plain_seconds, plain = timed(lambda e=log: one_by_one(e))  # type: ignore[misc]
        assert state == plain
        yield {
            "benchmark": "fold",
            "log": step.__name__,
            "events": len(log),
            "columns_per_s": round(len(log) / seconds),
            "apply_per_s": round(len(log) / plain_seconds),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=200_000)
    met = True
    for figures in measure(parser.parse_args().events):
        print(json.dumps(figures | {"limit_per_s": LIMIT_PER_S}), flush=True)
        met &= int(str(figures["columns_per_s"])) >= LIMIT_PER_S
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
