"""Attention that the engine had counted when a snapshot was taken: a restore begins its rows at zero, the session's
account must not. A snapshot takes it over here, and what is taken next is added to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvtape.backends.parts import Parts
from kvtape.backends.protocol import AttentionMass
from kvtape.planner.scores import MassHistory

__all__ = ["carry", "cut", "take_back", "taken"]


def carry(parts: Parts) -> None:
    """Before a snapshot: the engine's count so far becomes the session's."""
    if parts.capabilities.attention_scores:
        parts.carried = taken(parts)


def take_back(parts: Parts, history: MassHistory, carried: AttentionMass | None) -> None:
    """After a restore: the account is the snapshot's, and what the engine counted since then is nobody's."""
    if parts.capabilities.attention_scores:
        parts.backend.take_mass()
    parts.history, parts.carried, parts.probed = history, carried, None


def taken(parts: Parts) -> AttentionMass:
    """What every query since the last plan paid to the rows that are resident now, across snapshots and restores.

    The `peak` of a row is then a sum of peaks, an upper bound of the peak of the sum.
    """
    now, before = parts.backend.take_mass(), parts.carried
    parts.carried = None
    if before is None:
        return now
    _, at, known = np.intersect1d(now.tape_positions, before.tape_positions, assume_unique=True, return_indices=True)
    mass, peak = now.mass.copy(), now.peak.copy()
    mass[:, at] += before.mass[:, known]
    peak[:, at] += before.peak[:, known]
    return replace(now, n_queries=before.n_queries + now.n_queries, mass=mass, peak=peak)


def cut(parts: Parts, tape_stop: int) -> None:
    """Nothing at or past `tape_stop` has received anything: other tokens will stand there."""
    carried = parts.carried
    if carried is not None:
        kept = carried.tape_positions < tape_stop
        parts.carried = replace(
            carried,
            tape_positions=carried.tape_positions[kept],
            mass=carried.mass[:, kept],
            peak=carried.peak[:, kept],
        )
