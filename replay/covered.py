"""The model of a replay in NumPy: opened where the judge can read an engine's rows of it."""

from __future__ import annotations

from pathlib import Path

from kvtape.backends.errors import KvtapeError
from kvtape.backends.reference.errors import ModelUnsupported
from kvtape.backends.reference.model.weights import Weights
from kvtape.replay.findings import Storage

__all__ = ["ModelNotCovered", "covered_weights", "key_storage", "rounding_weights"]


class ModelNotCovered(KvtapeError):
    """Rows of this kind of model are not identified, nor are logits compared; the message says what is in the way."""


def covered_weights(path: str | Path) -> Weights:
    """Weights in float32 that stay packed. Raises ModelFileError, ModelNotCovered.

    Of a windowed model engines show the layers of full attention alone, and drop rows that a lineage still has.
    """
    try:
        weights = Weights(path, packed=True)
    except ModelUnsupported as err:
        raise ModelNotCovered(str(err)) from None
    window = max(weights.architecture.windows)
    if window:
        raise ModelNotCovered(f"{Path(path).name}: a sliding window of {window}; replay reads rows of full attention")
    return weights


def rounding_weights(weights: Weights, step: float) -> Weights | None:
    """The same file, multiplied with rows that are rounded as engines do; None where no matrix of it is packed."""
    rounding = Weights(weights.path, packed=True, step=step)
    return rounding if rounding.rounds else None


def key_storage(weights: Weights) -> Storage:
    """The coarsest storage among what layer-0 keys are made of."""
    types = {weights.embedding.storage, weights.layers[0].k.matrix.storage}
    if types <= {"F32"}:
        return "f32"
    return "half" if types <= {"F32", "F16", "BF16"} else "quantised"
