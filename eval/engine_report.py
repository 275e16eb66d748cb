"""Tracks as the rows of a report. Times stand apart, so that a report can be compared without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvtape.backends.reference.engines.engine import Memory
from kvtape.backends.reference.model.weights import PathReport
from kvtape.eval.engine_accuracy import EngineTrack, Step
from kvtape.eval.engine_contracts import verdict_of

__all__ = ["TIMES", "accuracy_row", "memory_body", "path_name", "rate", "timeless"]

TIMES = ("prefill_tokens_s", "decode_tokens_s", "step_times")
"""Keys of a row that another run of the same will not repeat."""


def accuracy_row(track: EngineTrack, path: PathReport) -> dict[str, Any]:
    """One engine: its promise and whether it was kept, how far it is from `standard`, what it holds, how fast it is."""
    verdict, info = verdict_of(track), track.info
    return {
        "engine": info.spec,
        "contract": str(info.contract),
        "promise": info.contract.promise,
        "bound": info.bound,
        "kept": verdict.kept,
        "why": verdict.why,
        "experimental": info.experimental,
        "quadratic": info.quadratic,
        "bench_only": info.bench_only,
        "path": path_name(path),
        "tiles_unpacked": track.tiles_unpacked,
        "prefill_tokens_s": rate(track.prompt_tokens, track.prefill_ns),
        "decode_tokens_s": rate(track.decode_steps, track.step_ns),
        "step_times": track.step_ns / track.exact_ns if track.exact_ns else None,
        "prompt_tokens": track.prompt_tokens,
        "decode_steps": track.decode_steps,
        "window_tokens": track.window_tokens,
        "memory": None if track.memory is None else memory_body(track.memory),
        "stages": track.stages,
        **_service(track),
        **_distance(track.steps),
    }


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in TIMES}


def path_name(path: PathReport) -> str:
    """`plain`: dequantised once and kept; `resident`: computed from the quantised weights as they lie in memory."""
    return "resident" if path.packed else "plain"


def rate(n: int, ns: int) -> float | None:
    """Of a second; None where nothing was timed."""
    return n * 1e9 / ns if n and ns else None


def memory_body(memory: Memory) -> dict[str, Any]:
    """Reachability (tokens), occupancy (rows, bytes) and capacity (bytes), apart."""
    return {
        "reachable_tokens": memory.reachable_tokens,
        "rows": memory.rows,
        "occupied_bytes": memory.occupied_bytes,
        "allocated_bytes": memory.allocated_bytes,
        "cold_bytes": memory.cold_bytes,
        "kinds": [
            {"kind": k.kind, "occupied": k.occupied, "allocated": k.allocated, "cold": k.cold} for k in memory.kinds
        ],
    }


def _service(track: EngineTrack) -> dict[str, Any]:
    kinds = Counter(problem.partition(":")[0] for problem in track.problems)
    return {
        "asked": track.asked,
        "served": len(track.steps),
        "served_rate": len(track.steps) / track.asked if track.asked else None,
        "problems": dict(sorted(kinds.items())),
        "first_problem": track.problems[0] if track.problems else None,
        "key_cosine": float(np.mean([k for k, _ in track.cosines])) if track.cosines else None,
        "value_cosine": float(np.mean([v for _, v in track.cosines])) if track.cosines else None,
    }


def _distance(steps: Sequence[Step]) -> dict[str, Any]:
    """Over the steps served; None where there is none."""
    kl = np.array([step.kl for step in steps])
    last = max((step.step for step in steps), default=0)
    late = [step.kl for step in steps if step.step > last * 3 // 4]
    parted = _first_other(steps)
    some = bool(steps)
    return {
        "match_rate": float(np.mean([step.same_top for step in steps])) if some else None,
        "top_k_overlap": float(np.mean([step.overlap for step in steps])) if some else None,
        "identical_steps": sum(step.identical for step in steps),
        "mean_kl": float(kl.mean()) if some else None,
        "max_kl": float(kl.max()) if some else None,
        "late_kl": float(np.mean(late)) if late else None,
        "nll_delta": float(np.mean([step.nll_delta for step in steps])) if some else None,
        "max_difference": max((step.difference for step in steps), default=None),
        "first_divergence": min(parted, default=None),
        "median_divergence": float(np.median(parted)) if parted else None,
        "diverged_prompts": len(parted),
        "prompts": len({step.case for step in steps}),
    }


def _first_other(steps: Sequence[Step]) -> list[int]:
    """For each prompt that has one, its first step with another first choice than `standard`."""
    first: dict[int, int] = {}
    for step in steps:
        if not step.same_top:
            first.setdefault(step.case, step.step)
    return list(first.values())
