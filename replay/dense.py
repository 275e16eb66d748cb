"""The dense reference: one forward of the NumPy decoder over every slot of a lineage, with no cache of any engine.

Each layer computes keys and values of a slot once. An epoch's queries attend to exactly the keys of that epoch, turned
to the cache positions they had then. Steps and attention are those of `backends.reference`; only who sees whom is
decided here. Weights stay packed, so that one matrix at a time is held as floats.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import Cancelled
from kvtape.backends.reference.model.blas import Floats, one_blas_thread
from kvtape.backends.reference.model.dispatch import logits_of
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.pages import paged
from kvtape.backends.reference.model.steps import attention_of, attn_out, embed, ffn, qkv
from kvtape.backends.reference.model.weights import Weights
from kvtape.replay.lineage import Epoch, Lineage, prune

__all__ = ["reference_logits"]

Ints = npt.NDArray[np.int64]


def reference_logits(
    weights: Weights, lineage: Lineage, wanted: Ints, stop: Callable[[], bool] | None = None
) -> npt.NDArray[np.float32]:
    """Logits float32 `[len(wanted), n_vocab]` after each wanted slot.

    `stop` is asked before every layer; once it says yes, Cancelled is raised.
    """
    pruned, wanted = prune(lineage, wanted)
    if not len(wanted):
        return np.empty((0, weights.n_vocab), np.float32)
    x, positions, router = embed(weights, pruned.tokens), _own_positions(pruned), LocalFfn(weights)
    with one_blas_thread():
        for layer in range(weights.architecture.n_layer):
            if stop is not None and stop():
                raise Cancelled("the reference forward was stopped")
            x = x + attn_out(weights, layer, _attend(weights, layer, x, pruned.epochs, positions))
            x = x + ffn(weights, layer, x, router)
    return logits_of(weights, x[wanted]).astype(np.float32, copy=False)


def _attend(weights: Weights, layer: int, x: Floats, epochs: tuple[Epoch, ...], positions: Ints) -> Floats:
    """Attention output `[n, n_head * head_dim_v]` before the output projection, for inputs `[n, n_embd]`."""
    shape, rotary = weights.architecture.shape, weights.architecture.rotaries[layer]
    q, k, v = qkv(weights, layer, x, positions)
    turned, turned_to = k.copy(), positions.copy()
    out = np.empty((len(x), shape.n_head * shape.head_dim_v), x.dtype)
    for epoch in epochs:
        moved = np.flatnonzero(turned_to[epoch.keys] != epoch.key_positions)
        if len(moved):
            slots, to = epoch.keys[moved], epoch.key_positions[moved]
            turned[slots], turned_to[slots] = rotary.turn(k[slots], to - positions[slots]), to
        own = np.arange(epoch.first, epoch.first + epoch.n)
        # In cache order, in which pages are laid out: the keys of an epoch may stand in any.
        visible, at = np.concatenate([epoch.keys, own]), np.concatenate([epoch.key_positions, positions[own]])
        order = np.argsort(at)
        pages = paged(at[order], turned[visible[order]], v[visible[order]])
        out[own] = attention_of(weights, layer, q[own], positions[own], pages)
    return out


def _own_positions(lineage: Lineage) -> Ints:
    positions = np.empty(lineage.n_slots, np.int64)
    for epoch in lineage.epochs:
        positions[epoch.first : epoch.first + epoch.n] = np.arange(epoch.position, epoch.position + epoch.n)
    return positions
