"""The pointwise parts: norms, activations, soft caps. Each row is its own; float32 in, float32 out."""

from __future__ import annotations

import numpy as np

from kvtape.backends.reference.model.architecture import Activation
from kvtape.backends.reference.model.blas import Floats

__all__ = ["activate", "rms_norm", "soft_cap"]

_GELU = 0.7978845608028654
"""sqrt(2 / pi), of the tanh form of GELU (arXiv 1606.08415, section 2)."""


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis."""
    scale = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps))
    return np.asarray(x * scale * weight)


def activate(gate: Floats, how: Activation) -> Floats:
    """SiLU, or GELU in its tanh form. Works in place on `gate` and returns it."""
    if how == "silu":
        # exp of a large negated input is inf, and the quotient 0: right, and not worth a warning.
        with np.errstate(over="ignore"):
            gate /= 1 + np.exp(-gate)
        return gate
    one = gate.dtype.type
    gate *= one(0.5) * (1 + np.tanh(one(_GELU) * (gate + one(0.044715) * gate * gate * gate)))
    return gate


def soft_cap(x: Floats, cap: float) -> Floats:
    """`cap * tanh(x / cap)` in place; a cap of 0 changes nothing."""
    if cap:
        x /= x.dtype.type(cap)
        np.tanh(x, out=x)
        x *= x.dtype.type(cap)
    return x
