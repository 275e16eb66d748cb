"""How `kvtape fleet` grows, event log included. One JSON line; exit 1 when a promise is missed.

    python benchmarks/bench_fleet.py [--requests N]

Processes that serve N and 10 N made requests (those of bench_curve.py), N = 100,000, over a pool of 16,384 blocks and
write their log: processor time and peak memory; promised: at most 11 times the time, and less than 2 GB for a million.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_curve import grown, report

from kvtape.cli.recording import run_row
from kvtape.sim.blocks.from_file import read_requests_file
from kvtape.sim.costs.roofline import roofline_costs
from kvtape.sim.fleet.figures import figures
from kvtape.sim.fleet.recording import write_fleet_log
from kvtape.sim.fleet.serving import Fleet, serve

SPEC = "flops=1e14,bytes_per_s=1e12,params=8e9,weight_bytes=1.6e10,row_bytes=131072"
POOL = 16_384
PARTS = ("read", "serve", "log")


def served(path: Path) -> dict[str, Any]:
    costs = roofline_costs(SPEC, machine=None, kvtape_version="bench")
    times = [time.process_time()]
    requests = read_requests_file(path)
    times.append(time.process_time())
    found = serve(requests, Fleet(POOL), costs)
    times.append(time.process_time())
    write_fleet_log(path.with_suffix(".duckdb"), run_row("simulation", {"bench": "fleet"}, {}, 0), requests, found)
    times.append(time.process_time())
    said = figures(requests, found)
    spent = {f"{part}_s": b - a for part, a, b in zip(PARTS, times, times[1:], strict=False)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"requests": said["requests"], "reused_share": said["reused_share"], "peak_bytes": peak, **spent}


def growth(folder: Path, n: int) -> bool:
    ok, (short, long), runs = grown(__file__, folder, n, PARTS)
    return report("fleet.growth", ok=ok, ratio=long / short, requests_per_s=round(10 * n / long), runs=runs)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--one", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(served(args.one)))
        return 0
    with tempfile.TemporaryDirectory(prefix="kvtape-bench-") as name:
        return 0 if growth(Path(name), args.requests) else 1


if __name__ == "__main__":
    sys.exit(main())
