"""Rows of the likelihood task: each policy over the whole text, and over each stretch of 1,000 tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvtape.eval.intervals import batch_means
from kvtape.eval.nll import NllTrack, stretches

__all__ = ["BATCH", "nll_rows"]

BATCH = 100
"""Tokens of one batch of the intervals: far more than one sentence."""


def nll_rows(tracks: Sequence[NllTrack], n_tokens: int, stretch: int) -> list[dict[str, Any]]:
    """First each policy's row over all (`part` `all`), then its stretches; `start` and `stop` are tape positions.

    `nll`, `kl` and `excess` are means in nats a token with their intervals; `excess` is what a token costs more than
    under dense attention, token by token, so that what makes a text hard does not widen its interval. None where there
    is nothing: `absent` says why the policy did not run.
    """
    rows = []
    dense = next((t.nll for t in tracks if not t.candidate.policy.evicts), [])
    for track in tracks:
        rows.append(_row(track, dense, "all", 1, n_tokens))
        if track.absent is None:
            for start, stop in stretches(n_tokens, stretch):
                rows.append(_row(track, dense, f"{start}-{stop}", max(1, start), stop))
    return rows


def _row(track: NllTrack, dense: Sequence[float], part: str, start: int, stop: int) -> dict[str, Any]:
    candidate = track.candidate
    part_of = slice(start - 1, stop - 1)
    nll, kl = track.nll[part_of], track.kl[part_of]
    compared = candidate.policy.evicts and bool(dense)
    excess = [a - b for a, b in zip(nll, dense[part_of], strict=True)] if compared else []
    return {
        "backend": track.backend,
        "policy": candidate.label,
        "budget": candidate.budget,
        "part": part,
        "start": start,
        "stop": stop,
        "n": len(nll),
        **_figures("nll", nll),
        **_figures("excess", excess),
        **_figures("kl", kl),
        "perplexity": round(math.exp(math.fsum(nll) / len(nll)), 4) if nll else None,
        "n_ctx": track.n_ctx,
        "resident_most": track.resident_most,
        "scored": track.scored,
        "absent": track.absent,
    }


def _figures(name: str, values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {name: None, f"{name}_low": None, f"{name}_high": None}
    mean, low, high = (None if math.isnan(x) else round(x, 6) for x in batch_means(values, BATCH))
    return {name: mean, f"{name}_low": low, f"{name}_high": high}
