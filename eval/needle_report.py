"""Rows of the needle task: recall of each policy, budget, backend and region, with its interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtape.eval.intervals import wilson
from kvtape.eval.needle import NeedleTrial

__all__ = ["needle_rows"]


def needle_rows(trials: Sequence[NeedleTrial]) -> list[dict[str, Any]]:
    """One row for each (backend, region, policy), in the order they were run; nothing in it depends on time.

    `kept`: mean tokens of the context left when the question came; `needle_kept`: share of trials in which the whole
    fact was; `scored`: false where a scored policy ran without scores, and so kept what `stream` keeps.
    """
    groups: dict[tuple[str, str, str, int | None], list[NeedleTrial]] = {}
    for trial in trials:
        key = (trial.backend, trial.region, trial.candidate.label, trial.candidate.budget)
        groups.setdefault(key, []).append(trial)
    return [
        {"backend": backend, "region": region, "policy": label, "budget": budget} | _figures(group)
        for (backend, region, label, budget), group in groups.items()
    ]


def _figures(group: Sequence[NeedleTrial]) -> dict[str, Any]:
    n, hits = len(group), sum(t.correct for t in group)
    low, high = wilson(hits, n)
    return {
        "n": n,
        "correct": hits,
        "recall": round(hits / n, 6),
        "recall_low": round(low, 6),
        "recall_high": round(high, 6),
        "kept": round(sum(t.kept for t in group) / n, 3),
        "needle_kept": round(sum(t.whole_needle for t in group) / n, 6),
        "scored": None if group[0].scored is None else all(t.scored for t in group),
    }
