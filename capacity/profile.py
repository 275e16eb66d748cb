"""The layer profile: bytes of a cache whose layers have one width, some of them with a window.

    bytes(ctx) = p * (G * ctx + W * min(ctx, w))

         bytes
           |              ____----   slope p*G: only global layers grow
           |     ____-----
           |   _/
           |  /   slope p*(G+W)
           | /
           +-----+------------------- ctx
                 w: the knee

`capacity.geometry` is the general form; both are held equal by a property test.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvtape.capacity.errors import CapacityError

__all__ = ["LayerKVProfile"]


@dataclass(frozen=True, slots=True)
class LayerKVProfile:
    """`global_layers` and `windowed_layers` (of `window` tokens; 0 or less: none) of `per_layer_bytes` a token each."""

    global_layers: int
    windowed_layers: int
    window: int
    per_layer_bytes: int

    def __post_init__(self) -> None:
        if self.global_layers < 0 or self.windowed_layers < 0 or self.global_layers + self.windowed_layers == 0:
            raise CapacityError(
                f"{self.global_layers} global and {self.windowed_layers} windowed layers: one is needed"
                "; give at least one layer"
            )
        if self.per_layer_bytes < 1:
            raise CapacityError(f"per_layer_bytes is {self.per_layer_bytes}; a layer needs at least one byte a token")

    @property
    def dense_bytes(self) -> int:
        """Bytes of a token with every layer in full."""
        return self.per_layer_bytes * (self.global_layers + self.windowed_layers)

    def bytes(self, n_ctx: int) -> int:
        """Bytes of the rows of `n_ctx` tokens."""
        if self.window <= 0:
            return self.dense_bytes * n_ctx
        rows = self.global_layers * n_ctx + self.windowed_layers * min(n_ctx, self.window)
        return self.per_layer_bytes * rows

    def marginal_bytes(self) -> int:
        """Bytes of one more token once the windows are full."""
        return self.dense_bytes if self.window <= 0 else self.per_layer_bytes * self.global_layers

    def inverse(self, budget: int, limit: int | None = None) -> int:
        """The most tokens whose rows fit `budget` bytes, at most `limit`.

        Raises CapacityError where nothing grows with the context (no global layer) and no limit is given.
        """
        tokens = self._unlimited(max(0, budget))
        if tokens is None:
            if limit is None:
                raise CapacityError("every layer is windowed, so any context fits; give the model's limit")
            return limit
        return tokens if limit is None else min(tokens, limit)

    def _unlimited(self, budget: int) -> int | None:
        dense = self.dense_bytes
        if self.window <= 0 or self.windowed_layers == 0 or budget < dense * self.window:
            return budget // dense
        if self.global_layers == 0:
            return None
        windows = self.windowed_layers * self.per_layer_bytes * self.window
        return (budget - windows) // (self.per_layer_bytes * self.global_layers)
