"""Simulated turns a second, memory, and growth: ten times the conversations, how many times the CPU?

Every conversation is one of three turns over a context that streams; all events are made, folded and counted. With 16
slots they wait and take each other's caches; with a slot each, all of them are there at once.
"""

from __future__ import annotations

import resource
import time

from kvtape.planner.blocks import CacheClass
from kvtape.planner.rows import SessionRow
from kvtape.sim.costs.model import CostTable
from kvtape.sim.costs.roofline import roofline_costs
from kvtape.sim.world.running import simulate
from kvtape.sim.world.script import Script, Step, Stretch, Turn
from kvtape.sim.world.settings import Settings

SIZES = (30, 300)
GROWTH = 11.0
SPEC = "flops=1e11,bytes_per_s=2e10,params=1.3e8,weight_bytes=1.4e8,row_bytes=23040"
TOKENS = tuple(range(4096))


def conversation(number: int) -> Script:
    """Three turns: 600 tokens, then 200 more each, 100 generated each time."""
    turns, tape = [], 0
    for i, more in enumerate((600, 200, 200)):
        prompt, tape = tape + more, tape + more + 100
        steps = (
            Step("prefix", prompt, stretches=(Stretch("user", CacheClass.VOLATILE, TOKENS[:prompt]),)),
            Step("generate", 100, prompt, TOKENS[prompt:tape]),
        )
        turns.append(Turn(i + 1, number * 10_000_000 + i * 60_000_000_000, 1_000_000_000, steps))
    row = SessionRow(run_id="r", session_id=f"s{number}", backend="llama", content=False, n_ctx=512, chunk=256)
    return Script(row, tuple(turns), "close", 0, "native", len(TOKENS))


def main() -> int:
    costs = roofline_costs(SPEC, machine=None, kvtape_version="bench")
    good = [_grows(costs, slots) for slots in (16, None)]
    return 0 if all(good) else 1


def _grows(costs: CostTable, slots: int | None) -> bool:
    settings = Settings(policy="stream:sink=4,recent=300", slots=slots)
    print(f"# {slots or 'as many'} slots" + ("" if slots else " as conversations"))
    spent: list[float] = []
    for size in SIZES:
        scripts = [conversation(i) for i in range(size)]
        began = time.process_time()
        figures = simulate(scripts, settings, costs).figures
        spent.append(time.process_time() - began)
        rate, events = figures["turns"] / spent[-1], figures["events"] / spent[-1]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{size:6} conversations: {spent[-1]:7.2f} s CPU, {rate:7.0f} turns/s, {events:7.0f} events/s, "
            f"{figures['displaced']} displaced, peak {peak:.0f} MiB"
        )
    growth = spent[-1] / spent[0] / (SIZES[-1] / SIZES[0]) * 10
    print(f"ten times the conversations cost {growth:.1f} times the CPU (bar: {GROWTH:.0f})")
    return growth <= GROWTH


if __name__ == "__main__":
    raise SystemExit(main())
