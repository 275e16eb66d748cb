"""Rows of a comparison with continuous batching: what keeping these rows cost, on the same tokens, way by way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, Final

from kvtape.backends.batching.config import BLOCK, Eviction
from kvtape.eval.batching.tracks import Lane, Versus
from kvtape.eval.intervals import student

__all__ = ["DENSE_LIMIT", "UNKNOWN", "agreement", "curve_rows", "versus_rows"]

DENSE_LIMIT: Final = 1e-2
"""Nats: the most that both dense log-probabilities of one token may differ. Else the two sides read two models."""

UNKNOWN: Final = "unknown"
"""What continuous batching does not reveal: which tokens are resident, in which layer (each evicts blocks of its own),
and the logits."""


def versus_rows(eviction: Eviction, found: Sequence[Versus]) -> list[dict[str, Any]]:
    """The comparator, dense, then each policy. Figures are over the tokens from each prompt's first evict on.

    `nll`: mean over prompts of the mean nats a token. `over_dense`, `over_native`: that less dense's and less the
    comparator's, prompt by prompt. Intervals are over prompts. `rows`: mean rows attended to; `rows_equal`: at every
    token as many as the comparator's. `kept`: which tokens those were.
    """
    native = [v.native for v in found]
    dense = [v.dense for v in found]
    lanes: list[tuple[str, str, str, list[Lane]]] = [
        ("native", eviction.label, UNKNOWN, native),
        ("dense", "none", "all", dense),
    ]
    for i, (candidate, _) in enumerate(found[0].policies):
        lanes.append(("policy", candidate.label, "in the log", [v.policies[i][1] for v in found]))
    return [
        {
            "comparator": eviction.label,
            "budget_blocks": eviction.most // BLOCK,
            "kind": kind,
            "policy": name,
            "n_prompts": len(found),
            "n": sum(len(v.tokens) - v.since for v in found),
            **_figures("nll", [_mean(v, lane) for v, lane in zip(found, of, strict=True)]),
            **_over("over_dense", found, of, dense),
            **_over("over_native", found, of, native),
            "rows": _rounded(math.fsum(map(_rows, found, of)) / len(found)),
            "rows_most": max(max(lane.rows[v.since :]) for v, lane in zip(found, of, strict=True)),
            "rows_equal": all(lane.rows == v.native.rows for v, lane in zip(found, of, strict=True)),
            "scored": of[0].scored,
            "kept": kept,
            "kept_by_layer": UNKNOWN if kind == "native" else "alike",
        }
        for kind, name, kept, of in lanes
    ]


def curve_rows(eviction: Eviction, found: Sequence[Versus]) -> list[dict[str, Any]]:
    """The cache step by step: steps that follow each other over equally many blocks are one row.

    `tokens`: of the sequence after the first and the last of them; `rows`: of each layer that they attended to.
    """
    rows = []
    for versus in found:
        for blocks, steps in groupby(enumerate(versus.steps), key=lambda pair: pair[1].blocks):
            part = list(steps)
            first, last = part[0], part[-1]
            rows.append(
                {
                    "comparator": eviction.label,
                    "prompt": versus.prompt.label,
                    "step": first[0],
                    "last_step": last[0],
                    "tokens": first[1].tokens,
                    "last_tokens": last[1].tokens,
                    "blocks": blocks,
                    "rows_least": min(step.rows for _, step in part),
                    "rows_most": max(step.rows for _, step in part),
                }
            )
    return rows


def agreement(found: Sequence[Versus]) -> dict[str, Any]:
    """Whether both sides, keeping everything, say the same of the same tokens; `max_difference` in nats."""
    worst = max(v.dense_difference for v in found)
    return {"max_difference": _rounded(worst), "limit": DENSE_LIMIT, "same_model": worst <= DENSE_LIMIT}


def _over(name: str, found: Sequence[Versus], lanes: Sequence[Lane], base: Sequence[Lane]) -> dict[str, float | None]:
    if lanes == base:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    each = [_mean(v, a) - _mean(v, b) for v, a, b in zip(found, lanes, base, strict=True)]
    return _figures(name, each)


def _mean(versus: Versus, lane: Lane) -> float:
    part = lane.nll[versus.since :]
    return math.fsum(part) / len(part)


def _rows(versus: Versus, lane: Lane) -> float:
    part = lane.rows[versus.since :]
    return sum(part) / len(part)


def _figures(name: str, values: Sequence[float]) -> dict[str, float | None]:
    mean, low, high = (None if math.isnan(x) else _rounded(x) for x in student(values))
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _rounded(value: float) -> float:
    return round(value, 6)
