"""How `kvtape curve` grows, and what it takes. One JSON line each; exit 1 when a promise is missed.

    python benchmarks/bench_curve.py [--requests N]

growth    processor time of the default sweep (fifo, lru, opt) at N and at 10 N requests; promised: at most 11 times
policies  accesses a second of processor time of each policy at one budget
million   a process that reads 1,000,000 requests and sweeps them: wall time and peak memory; promised: below 2 GB

The traces are made: sessions of a few turns that begin with one of some shared prompts, at a steady rate, so that a
longer trace is more of the same. Times are processor time: a busy machine does not show.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvtape.sim.blocks.from_file import read_trace_file
from kvtape.sim.blocks.policies.registry import POLICY_NAMES, choose_policy
from kvtape.sim.blocks.rules import PRESETS
from kvtape.sim.blocks.sweep import sweep

GROWTH = 11.0
MILLION = 1_000_000
MEMORY_BYTES = 2_000_000_000
OPEN_SESSIONS = 400
SHARED = 40


def made_requests(n: int, seed: int) -> Iterator[tuple[int, list[int]]]:
    """(milliseconds, block ids): a session is a shared beginning and 2 blocks more every turn, 6 turns on average."""
    rng = np.random.default_rng(seed)
    fresh = SHARED * 4
    live: list[list[int]] = []
    picks, ends, begins = (rng.random(n).tolist() for _ in range(3))
    for i in range(n):
        slot = int(picks[i] * OPEN_SESSIONS)
        if slot >= len(live):
            live.append([])
            slot = len(live) - 1
        session = live[slot]
        if not session or ends[i] < 1 / 6:
            shared = int(begins[i] ** 3 * SHARED)
            session = live[slot] = [shared * 4 + k for k in range(4)]
        session += (fresh, fresh + 1)
        fresh += 2
        yield i * 10, session


def write_trace(path: Path, n: int, seed: int = 1) -> Path:
    with path.open("w", encoding="ascii") as out:
        for at, ids in made_requests(n, seed):
            row = {"timestamp": at, "input_length": 512 * len(ids), "output_length": 100, "hash_ids": ids}
            out.write(json.dumps(row) + "\n")
    return path


def swept(path: Path, names: tuple[str, ...] = ("fifo", "lru", "opt")) -> dict[str, Any]:
    began = time.process_time()
    trace = read_trace_file(path)
    read = time.process_time()
    curve = sweep(trace, PRESETS["kvtape"], [choose_policy(name) for name in names])
    return {
        "requests": trace.n_requests,
        "accesses": trace.n_accesses,
        "points": len(curve.points),
        "read_s": read - began,
        "sweep_s": time.process_time() - read,
    }


def growth(folder: Path, n: int) -> bool:
    """The same budgets at both lengths, since more blocks are more default budgets."""
    times = []
    budgets = [16 << i for i in range(12)]
    for requests in (n, 10 * n):
        trace_file = write_trace(folder / f"{requests}.jsonl", requests)
        began = time.process_time()
        trace = read_trace_file(trace_file)
        sweep(trace, PRESETS["kvtape"], [choose_policy(name) for name in ("fifo", "lru", "opt")], budgets)
        times.append(time.process_time() - began)
    ratio = times[1] / times[0]
    return report("growth", ok=ratio <= GROWTH, requests=[n, 10 * n], cpu_s=times, ratio=ratio)


def policies(folder: Path, n: int) -> bool:
    trace = read_trace_file(write_trace(folder / "policies.jsonl", n))
    rates = {}
    for name in POLICY_NAMES:
        began = time.process_time()
        sweep(trace, PRESETS["libcachesim"], [choose_policy(name)], [1024])
        rates[name] = round(trace.n_accesses / (time.process_time() - began))
    return report("policies", ok=True, accesses=trace.n_accesses, accesses_per_s=rates)


def million(folder: Path) -> bool:
    path = write_trace(folder / "million.jsonl", MILLION)
    done = subprocess.run([sys.executable, __file__, "--one", str(path)], check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    return report("million", ok=found["peak_bytes"] < MEMORY_BYTES, **found)


def report(name: str, *, ok: bool, **found: Any) -> bool:
    print(json.dumps({"bench": f"curve.{name}", "ok": ok, **found}), flush=True)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        found = swept(args.one)
        print(json.dumps({**found, "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvtape-bench-") as name:
        folder = Path(name)
        good = [growth(folder, args.requests), policies(folder, args.requests), million(folder)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
