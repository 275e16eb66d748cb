"""How `kvtape curve` grows, and what it takes. One JSON line each; exit 1 when a promise is missed.

    python benchmarks/bench_curve.py [--requests N]

policies  accesses a second of processor time of each policy at one budget
growth    processes that read and sweep (fifo, lru, opt; 16 to 32,768 blocks) N and 10 N requests, N = 100,000:
          processor time and peak memory; promised: at most 11 times the time, and less than 2 GB for a million requests

The traces are made: sessions of a few turns that begin with one of some shared prompts, at a steady rate, so that a
longer trace is more of the same. Both lengths are larger than the processor's caches. Times are processor time: a busy
machine shows less.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
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
BUDGETS = [16 << i for i in range(12)]


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


def swept(path: Path) -> dict[str, Any]:
    began = time.process_time()
    trace = read_trace_file(path)
    read = time.process_time()
    sweep(trace, PRESETS["kvtape"], [choose_policy(name) for name in ("fifo", "lru", "opt")], BUDGETS)
    return {
        "requests": trace.n_requests,
        "accesses": trace.n_accesses,
        "read_s": read - began,
        "sweep_s": time.process_time() - read,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def policies(folder: Path, n: int) -> bool:
    trace = read_trace_file(write_trace(folder / "policies.jsonl", n))
    rates = {}
    for name in POLICY_NAMES:
        began = time.process_time()
        sweep(trace, PRESETS["libcachesim"], [choose_policy(name)], [1024])
        rates[name] = round(trace.n_accesses / (time.process_time() - began))
    return report("curve.policies", ok=True, accesses=trace.n_accesses, accesses_per_s=rates)


def growth(folder: Path, n: int) -> bool:
    """The same budgets at both lengths, since more blocks are more default budgets."""
    ok, (short, long), runs = grown(__file__, folder, n, ("read", "sweep"))
    return report("curve.growth", ok=ok, ratio=long / short, runs=runs)


def grown(
    script: str, folder: Path, n: int, parts: Sequence[str]
) -> tuple[bool, tuple[float, float], list[dict[str, Any]]]:
    """`script --one` on N and on 10 N requests: whether it kept the promises, seconds of its parts, what it said."""
    runs = []
    for requests in (n, 10 * n):
        path = write_trace(folder / f"{requests}.jsonl", requests)
        done = subprocess.run([sys.executable, script, "--one", str(path)], check=True, stdout=subprocess.PIPE)
        runs.append(json.loads(done.stdout))
    short, long = (sum(one[f"{part}_s"] for part in parts) for one in runs)
    ok = long <= GROWTH * short and (10 * n != MILLION or runs[1]["peak_bytes"] < MEMORY_BYTES)
    return ok, (short, long), runs


def report(name: str, *, ok: bool, **found: Any) -> bool:
    print(json.dumps({"bench": name, "ok": ok, **found}), flush=True)
    return ok


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(swept(args.one)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvtape-bench-") as name:
        folder = Path(name)
        good = [policies(folder, args.requests // 5), growth(folder, args.requests)]
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
