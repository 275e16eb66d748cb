"""`kvtape fleet` beside Dynamo's offline replay: one worker, the same trace, the same pool."""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from commands import timed

__all__ = ["DYNAMO", "DYNAMO_NEEDS", "compare_fleet"]

DYNAMO = ("ai-dynamo==1.2.1",)
"""Installed without what it depends on, which is a serving stack: the replay needs the few of DYNAMO_NEEDS."""
DYNAMO_NEEDS = (
    "ai-dynamo-runtime==1.2.1",
    *("aiohttp", "msgspec", "numpy", "prometheus-client", "pyzmq", "transformers", "zstandard"),
)
POOL = 16_384
BLOCK_TOKENS = 512
ROOFLINE = "flops=1e14,bytes_per_s=1e12,params=8e9,weight_bytes=1.6e10,row_bytes=131072"
REUSE_TOLERANCE = 0.01
"""Shares of reused tokens may differ by this: times differ, and with them what is in use when a block must go."""


def compare_fleet(trace: Path, python: Path, rounds: int, scratch: Path) -> dict[str, Any]:
    """Ours with every event in a log. Rates are of whole commands, the start of both interpreters included."""
    kvtape, costs, log = Path(sys.executable).with_name("kvtape"), scratch / "costs.json", scratch / "fleet.duckdb"
    timed([kvtape, "calibrate", "--roofline", ROOFLINE, "--out", costs, "--json"])
    ours = [kvtape, "fleet", trace, "--costs", costs, "--pool-blocks", str(POOL), "--log", log, "--json"]
    report = scratch / "dynamo.json"
    theirs = [
        *(python, "-m", "dynamo.replay", trace, "--num-workers", "1", "--replay-mode", "offline"),
        *("--router-mode", "round_robin", "--trace-block-size", str(BLOCK_TOKENS), "--report-json", report),
        *("--extra-engine-args", json.dumps({"num_gpu_blocks": POOL, "block_size": BLOCK_TOKENS})),
    ]
    mine, other = [], []
    for _ in range(rounds):
        mine.append(timed(ours))
        for left in scratch.glob("fleet.duckdb*"):
            left.unlink()
        other.append(timed(theirs, report))
    n = mine[0].said["figures"]["requests"]
    shares = mine[0].said["figures"]["reused_share"], other[0].said["prefix_cache_reused_ratio"]
    found = {
        "requests": n,
        "same_report_every_time": len({m.said["digest"] for m in mine}) == 1,
        "peer_same_report_every_time": len({json.dumps(_timeless(o.said), sort_keys=True) for o in other}) == 1,
        "reused_share": shares[0],
        "peer_reused_share": shares[1],
        "peer_requests_per_s_by_itself": round(n / statistics.median(o.said["wall_time_ms"] / 1000 for o in other)),
    }
    for name, runs in (("", mine), ("peer_", other)):
        cpu = statistics.median(r.cpu_s for r in runs)
        found |= {
            f"{name}cpu_s": cpu,
            f"{name}wall_s": statistics.median(r.wall_s for r in runs),
            f"{name}requests_per_cpu_s": round(n / cpu),
            f"{name}peak_bytes": max(r.peak_bytes for r in runs),
        }
    ok = found["cpu_s"] <= found["peer_cpu_s"] and found["peak_bytes"] < found["peer_peak_bytes"]
    return {"ok": ok and abs(shares[0] - shares[1]) <= REUSE_TOLERANCE, **found}


def _timeless(said: dict[str, Any]) -> dict[str, Any]:
    """Without how long the replay itself took."""
    return {k: v for k, v in said.items() if k != "wall_time_ms" and not k.startswith("processed_")}
