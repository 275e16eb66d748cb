"""How long one plan takes. One JSON line per context size and path; exit 1 when a promise is missed.

    python benchmarks/bench_plan.py [--runs N]

table_ms    `plan_hot_set` on a `BlockTable` that a session carries along, one block appended since the last plan:
            the appending is in the figure
first_ms    the same on a table that has not planned yet: everything is ranked once
list_ms     `plan_hot_set` on a list of `Block`: read, checked and ranked every time. Held to the promise too
session_ms  a step of a session: a token more in the catalog, its table put right, the plan, the evicted split off;
            not for scores, which are new for every block at every plan
scores_ms   putting new scores of every token on the blocks, which a scored policy does before each plan
objects_ms  reading `plan.evict` and `plan.keep` as objects, on top of any of them
plain_ms    the straightforward Python version (plain_plan.py) on the same blocks; the same blocks go

Times are CPU time of one thread, the lower quartile of the runs: what else the machine does only adds to them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from plain_plan import plain_plan

from kvtape.backends.catalog import BlockCatalog, SegmentKind
from kvtape.planner.blocks import Block, CacheClass
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.plan import Plan, StreamPolicy, plan_hot_set
from kvtape.planner.ranges import RangeSet
from kvtape.planner.scores import score_blocks
from kvtape.planner.table import BlockTable

BLOCK = 32
LIMIT_MS = {131_072: 2.0, 1_048_576: 15.0}
SINK, RECENT = 128, 4096
CAN = Capabilities(remove_middle=True, attention_scores=True)


def blocks_of(tokens: int, scored: bool) -> list[Block]:
    """A system prompt, a repository map, and turns of chat; scores are seeded draws."""
    draws = np.random.default_rng(7).random(tokens // BLOCK)
    out = []
    for i, score in enumerate(draws.tolist()):
        kind = CacheClass.TASK_PINNED if i < 8 else CacheClass.REPO_MAP if i < 64 else CacheClass.VOLATILE
        at = i * BLOCK
        out.append(Block(i, at, at + BLOCK, "user", kind, last_used=i // 40, score=score if scored else None))
    return out


def quartile_ms(action: Callable[[], object], runs: int) -> float:
    seconds = []
    for _ in range(runs):
        began = time.process_time()
        action()
        seconds.append(time.process_time() - began)
    return statistics.quantiles(seconds, n=4)[0] * 1e3


def session_steps(tokens: int, path: str) -> Callable[[], None]:
    """One token in and, when it does not fit, one or one block out: the same blocks as a `BlockCatalog` holds them."""
    kind = SegmentKind("user", CacheClass.VOLATILE)
    catalog, resident, tape = BlockCatalog(BLOCK), RangeSet([(0, tokens)]), tokens
    catalog.extend(tokens, kind, new_segment=True, clock=0)
    stream = StreamPolicy(SINK, tokens - SINK - 1) if path == "stream" else None

    def step() -> None:
        nonlocal resident, tape
        catalog.extend(1, kind, new_segment=False, clock=1)
        tape, resident = tape + 1, resident | RangeSet([(tape, tape + 1)])
        table = catalog.resident_table(resident)
        found = plan_hot_set(table, budget=tokens, recent=1, stream=stream, split=path == "stream", capabilities=CAN)
        gone = [(r.start, r.stop) for r in found.evict]
        catalog.split(gone)
        resident -= RangeSet(gone)

    step()
    return step


def measure(tokens: int, path: str, runs: int) -> bool:
    blocks = blocks_of(tokens, path == "scored")
    budget, stream = tokens // 4, StreamPolicy(SINK, RECENT) if path == "stream" else None

    def plan(of: list[Block] | BlockTable) -> Plan:
        return plan_hot_set(of, budget=budget, sink=SINK, recent=RECENT, stream=stream, capabilities=CAN)

    table, last = BlockTable(blocks), blocks[-1]

    def one_more() -> None:
        nonlocal last
        last = replace(last, block_id=last.block_id + 1, start=last.stop, stop=last.stop + BLOCK)
        table.insert([last])
        plan(table)

    fresh = iter([BlockTable(blocks) for _ in range(runs)])
    plain: Callable[[], tuple[list[int], list[int]]] = lambda: plain_plan(  # noqa: E731
        blocks, budget=budget, sink=SINK, recent=RECENT, stream=path == "stream", scored=path == "scored"
    )
    assert [r.block_id for r in plan(blocks).evict] == plain()[1], "both versions evict the same blocks"
    plan(table)
    if path == "scored":
        positions, scores = np.arange(tokens), np.random.default_rng(8).random(tokens)
        figures = {"scores_ms": quartile_ms(lambda: score_blocks(blocks, positions, scores), runs)}
    else:
        figures = {"session_ms": quartile_ms(session_steps(tokens, path), runs)}
    figures |= {
        "table_ms": quartile_ms(one_more, runs),
        "first_ms": quartile_ms(lambda: plan(next(fresh)), runs),
        "list_ms": quartile_ms(lambda: plan(blocks), runs),
        "plain_ms": quartile_ms(plain, max(3, runs // 5)),
    }
    plans = iter([plan(blocks) for _ in range(runs)])

    def objects() -> None:
        found = next(plans)
        assert found.evict
        assert found.keep

    figures["objects_ms"] = quartile_ms(objects, runs)
    limit = LIMIT_MS[tokens]
    shown = {name: round(value, 3) for name, value in figures.items()}
    print(
        json.dumps(
            {"benchmark": "plan", "path": path, "tokens": tokens, "blocks": len(blocks), "limit_ms": limit} | shown
        ),
        flush=True,
    )
    return max(figures["table_ms"], figures["list_ms"], figures.get("session_ms", 0.0)) <= limit


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=25)
    runs = parser.parse_args().runs
    kept = [measure(tokens, path, runs) for tokens in LIMIT_MS for path in ("stream", "class", "scored")]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
