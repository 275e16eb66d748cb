"""What a fleet's run came to: the figures of `simulate`, as far as blocks have them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from kvtape.sim.blocks.block_trace import Ints, Requests
from kvtape.sim.fleet.serving import UNSERVED, Fleet, Served
from kvtape.sim.nearest_rank import MEDIAN, P95, nearest_rank

__all__ = ["figures", "rules"]


def figures(requests: Requests, served: Served) -> dict[str, Any]:
    """Over all requests that were served; a figure that nothing was measured for is None."""
    done = served.began != UNSERVED
    outputs, spoke = requests.outputs, done & (requests.outputs > 0)
    ttft, queued = served.prompted - served.arrived, served.began - served.arrived
    decode = served.ended - served.prompted
    offered = int(requests.prompts[done].sum())
    reused = int(served.reused.sum())
    return {
        "requests": len(done),
        "served": int(done.sum()),
        "unserved": int((~done).sum()),
        "requests_without_blocks": requests.trace.without_blocks,
        "ttft_p50_ns": _rank(MEDIAN, ttft[done]),
        "ttft_p95_ns": _rank(P95, ttft[done]),
        "tpot_p50_ns": _rank(MEDIAN, decode[spoke] // outputs[spoke]),
        "tpot_p95_ns": _rank(P95, decode[spoke] // outputs[spoke]),
        "latency_p50_ns": _rank(MEDIAN, (served.ended - served.arrived)[done]),
        "latency_p95_ns": _rank(P95, (served.ended - served.arrived)[done]),
        "queued_p95_ns": _rank(P95, queued[done]),
        "end_ns": int(served.ended.max(initial=0)),
        "prompt_tokens": offered,
        "reused_tokens": reused,
        "prefilled_tokens": offered - reused,
        "reused_share": reused / offered if offered else None,
        "generated_tokens": int(outputs[done].sum()),
        "evicted_blocks": served.evicted,
        "peak_blocks_in_use": served.peak_blocks,
    }


def rules(fleet: Fleet, block_tokens: int) -> dict[str, str]:
    """What the numbers rest on, in words."""
    pace = "" if fleet.pace == 1 else f", {fleet.pace:g} times as fast"
    slots = "as many as the pool has room for" if fleet.slots is None else str(fleet.slots)
    return {
        "workload": "recorded prompts and lengths of answers",
        "arrivals": f"open loop: recorded arrival times{pace}",
        "queue": "first come, first served; who waits for room keeps all behind it waiting",
        "slots": f"{slots}, each computing at the calibrated speed",
        "pool": f"{fleet.pool_blocks} blocks of {block_tokens} tokens for all requests",
        "prefix": "blocks up to the first that is not there; at least the last token is computed",
        "in_flight": "a request holds its blocks, its answer's too, to its end; they are shared from its beginning on",
        "evicted": "what nobody holds, last used first, a prompt's last block before its first",
        "ttft": "from arrival to the logits of the prompt's last token",
    }


def _rank(share: Fraction, values: Ints) -> int | None:
    if not len(values):
        return None
    at = nearest_rank(share, len(values))
    return int(np.partition(values, at)[at])
