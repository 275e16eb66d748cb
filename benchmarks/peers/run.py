"""`kvtape curve` and `fleet` beside native peers, in one run: the same rates, and who is quicker.

    make bench-peers TRACE=F.jsonl

    python benchmarks/peers/run.py TRACE.jsonl [--rounds N] [--venv DIR]

TRACE is a Mooncake request trace. The peers are installed from PyPI into an environment of their own, which is thrown
away in the end (DIR is kept, and used again). libcachesim is GPL: it runs as a process, nothing of it is imported
here. One JSON line for each comparison; exit 1 when a rate differs or a promise is missed.

sweep     default budgets x fifo, lru, opt under the rules of kvcache-simulator: rates to 1e-9; wall time of the two
          commands, one after the other, round after round; promised: the median of our times is not above theirs
misses    shared policies at 1,024, 4,096 and 16,384 blocks under the rules of libcachesim: the same miss ratios
fleet     one worker with 16,384 blocks beside Dynamo's offline replay: what share is reused; promised: less processor
          time and less memory, with the log of all events on
own       LRU written in Python by the user, accesses a second of processor time; promised: twice libcachesim's hooks
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from commands import timed
from fleet import DYNAMO, DYNAMO_NEEDS, compare_fleet

from kvtape.sim.blocks.accesses import Workload
from kvtape.sim.blocks.block_trace import BlockTrace
from kvtape.sim.blocks.from_file import read_trace_file
from kvtape.sim.blocks.policies.registry import CLASSES, PolicyChoice, choose_policy
from kvtape.sim.blocks.rules import PRESETS
from kvtape.sim.blocks.sweep import sweep

HERE = Path(__file__).parent
PEERS = ("kvcache-simulator==0.1.3", "libcachesim==0.3.5", *DYNAMO_NEEDS)
MODEL = "llama-3.1-8b"
"""64 MiB a block of 512 tokens: the peer's default budgets are 16, 32, 64, ... blocks."""
SIZES = (1024, 4096, 16384)
DIFFERENT = {"w-tinylfu": "libcachesim counts uses in a sketch of its own, kvtape counts them"}
RATE_TOLERANCE = 1e-9
OWN_LIMIT = 2.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--venv", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtape-peers-") as scratch:
        python = installed(args.venv or Path(scratch) / "venv")
        trace = read_trace_file(args.trace)
        oracle = write_oracle(trace, Path(scratch) / "trace.oracleGeneral")
        good = [
            report("sweep", **compare_sweep(args.trace, python, args.rounds)),
            report("misses", **compare_misses(trace, python, oracle)),
            report("fleet", **compare_fleet(args.trace, python, args.rounds, Path(scratch))),
            report("own", **compare_own(trace, python, oracle, args.rounds)),
        ]
    return 0 if all(good) else 1


def installed(folder: Path) -> Path:
    """The interpreter of an environment that has the peers."""
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"installing {', '.join((*PEERS, *DYNAMO))}", file=sys.stderr, flush=True)
        venv.create(folder, with_pip=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *PEERS], check=True)
        subprocess.run([*pip, "--no-deps", *DYNAMO], check=True)
    return python


def report(name: str, *, ok: bool, **found: Any) -> bool:
    print(json.dumps({"bench": f"peers.{name}", "ok": ok, **found}), flush=True)
    return ok


def compare_sweep(trace: Path, python: Path, rounds: int) -> dict[str, Any]:
    ours = [Path(sys.executable).with_name("kvtape"), "curve", trace, "--rules", "kvcache-simulator", "--json"]
    theirs = [
        *(python.with_name("kvcache-simulator"), "run", "--trace", trace, "--model", MODEL),
        *("--block-size", "512", "--format", "json", "--no-progress"),
    ]
    timed(theirs)  # it compiles itself the first time
    times: list[tuple[float, float, float, float]] = []
    for _ in range(rounds):
        mine, other = timed(ours), timed(theirs)
        times.append((mine.wall_s, other.wall_s, mine.cpu_s, other.cpu_s))
    wanted = {
        ("opt" if policy == "optimal" else policy, point["cacheBlocks"]): result["hitRate"]
        for point in other.said["points"]
        for policy, result in point["results"].items()
    }
    found = {(row["policy"], row["budget_blocks"]): row["hit_rate"] for row in mine.said["rows"]}
    same_points = wanted.keys() == found.keys()
    worst = max((abs(found[k] - wanted[k]) for k in wanted.keys() & found.keys()), default=1.0)
    wall, peer_wall, cpu, peer_cpu = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "ok": same_points and worst <= RATE_TOLERANCE and wall <= peer_wall,
        "points": len(found),
        "worst_rate_difference": worst,
        "wall_s": wall,
        "peer_wall_s": peer_wall,
        "cpu_s": cpu,
        "peer_cpu_s": peer_cpu,
    }


def write_oracle(trace: BlockTrace, path: Path) -> Path:
    """The accesses as libCacheSim's oracleGeneral records, with the next access that its Belady needs; -1 for none."""
    a = Workload(trace, PRESETS["libcachesim"]).root_first
    record = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])
    rows = np.zeros(len(a), record)
    rows["time"], rows["id"], rows["size"] = a.request, a.blocks + 1, 1
    again = np.flatnonzero(a.before >= 0)
    rows["next"] = -1
    rows["next"][a.before[again]] = again + 1
    rows.tofile(path)
    return path


def libcachesim(python: Path, oracle: Path, policies: Sequence[str]) -> list[dict[str, Any]]:
    sizes = ",".join(map(str, SIZES))
    command = [python, HERE / "libcachesim_side.py", oracle, sizes, *policies]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def compare_misses(trace: BlockTrace, python: Path, oracle: Path) -> dict[str, Any]:
    names = [*sorted(CLASSES), "opt"]
    theirs = {(row["policy"], row["size"]): row["miss_ratio"] for row in libcachesim(python, oracle, names)}
    curve = sweep(trace, PRESETS["libcachesim"], [choose_policy(name) for name in names], SIZES)
    rows = {}
    for point in curve.points:
        key = point.policy, point.budget_blocks
        rows[key] = (1 - point.hit_rate, theirs[key])
    worst = max(abs(mine - other) for (name, _), (mine, other) in rows.items() if name not in DIFFERENT)
    return {
        "ok": worst <= RATE_TOLERANCE,
        "worst_difference": worst,
        "miss_ratios": [
            {"policy": name, "blocks": size, "kvtape": mine, "libcachesim": other, "note": DIFFERENT.get(name)}
            for (name, size), (mine, other) in rows.items()
        ],
    }


def compare_own(trace: BlockTrace, python: Path, oracle: Path, rounds: int) -> dict[str, Any]:
    sys.path.insert(0, str(HERE))
    own: PolicyChoice = choose_policy("own_lru:OwnLru")
    ours, theirs, same = [], [], True
    for _ in range(rounds):
        peer = libcachesim(python, oracle, ["plugin"])
        began = time.process_time()
        curve = sweep(trace, PRESETS["libcachesim"], [own], SIZES)
        ours.append(time.process_time() - began)
        theirs.append(sum(row["cpu_s"] for row in peer))
        same &= all(
            abs(1 - p.hit_rate - row["miss_ratio"]) < RATE_TOLERANCE for p, row in zip(curve.points, peer, strict=True)
        )
    accesses = trace.n_accesses * len(SIZES)
    mine, other = accesses / statistics.median(ours), accesses / statistics.median(theirs)
    return {
        "ok": same and mine >= OWN_LIMIT * other,
        "same_miss_ratios": same,
        "accesses_per_s": round(mine),
        "peer_accesses_per_s": round(other),
        "ratio": mine / other,
    }


if __name__ == "__main__":
    sys.exit(main())
