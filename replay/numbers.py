"""How far an engine's logits are from the reference's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtape.backends.logits import log_softmax

__all__ = ["Agreement", "compare_logits", "kl_nats", "merge"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """Over `checkpoints` places: KL(reference || engine) in nats, largest and mean; share of equal best tokens."""

    checkpoints: int
    max_kl: float
    mean_kl: float
    top1: float


def kl_nats(reference: npt.NDArray[np.float32], engine: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """KL(softmax(reference) || softmax(engine)) of each row `[n, n_vocab]`, in float64; NaN logits give infinity."""
    p, q = log_softmax(reference), log_softmax(engine)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    # Rounding can leave a sum of -1e-17 where the two are equal.
    return np.where(np.isfinite(kl), np.maximum(kl, 0.0), np.inf)


def compare_logits(reference: npt.NDArray[np.float32], engine: npt.NDArray[np.float32]) -> Agreement | None:
    """None where there is nothing to compare. Raises ValueError when the shapes differ."""
    if reference.shape != engine.shape:
        raise ValueError(f"logits {engine.shape}, reference {reference.shape}")
    if not len(reference):
        return None
    kl = kl_nats(reference, engine)
    top1 = float((reference.argmax(axis=1) == engine.argmax(axis=1)).mean())
    return Agreement(len(kl), float(kl.max()), float(kl.mean()), top1)


def merge(parts: Iterable[Agreement | None]) -> Agreement | None:
    """One agreement over the checkpoints of several sessions."""
    known = [part for part in parts if part is not None]
    n = sum(part.checkpoints for part in known)
    if not n:
        return None
    mean = sum(part.mean_kl * part.checkpoints for part in known) / n
    top1 = sum(part.top1 * part.checkpoints for part in known) / n
    return Agreement(n, max(part.max_kl for part in known), mean, top1)
