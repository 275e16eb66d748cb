"""KV geometry: what each group of a model's layers keeps for a context, whatever engine runs it.

These are ideal bytes: exactly the rows that attention can still see. What an engine allocates for them is
`capacity.allocation`. How layers are spread over devices is the caller's choice: a group can be sized alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from kvtape.capacity.errors import CapacityError
from kvtape.capacity.widths import row_bytes

__all__ = ["KVGeometry", "LayerGroup", "LayerKind"]


class LayerKind(StrEnum):
    """How a layer remembers.

    GLOBAL: every token. WINDOWED: the last `window` tokens. CHUNKED: at most one chunk of `window` tokens. LATENT: one
    compressed row a token (MLA), no values. RECURRENT: one state a sequence, whatever the context; K is the convolution
    state, V the recurrent one. SHARED: reads another layer's rows.
    """

    GLOBAL = "global"
    WINDOWED = "windowed"
    CHUNKED = "chunked"
    LATENT = "latent"
    RECURRENT = "recurrent"
    SHARED = "shared"


_PARTS = {
    LayerKind.GLOBAL: "full",
    LayerKind.WINDOWED: "swa",
    LayerKind.CHUNKED: "swa",
    LayerKind.LATENT: "latent",
    LayerKind.RECURRENT: "recurrent",
    LayerKind.SHARED: "shared",
}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """`count` layers alike. `k_elems`, `v_elems`: elements of a row (of a state: RECURRENT), all `heads` together.

    `part` names the cache that the layers live in; by default it follows from the kind. `copy_elems`: LATENT, elements
    of the values within a row, which some engines keep a second time.
    """

    kind: LayerKind
    count: int
    k_elems: int
    v_elems: int
    heads: int = 1
    window: int = 0
    type_k: str = "f16"
    type_v: str = "f16"
    part: str = ""
    copy_elems: int = 0

    def __post_init__(self) -> None:
        if min(self.count, self.k_elems, self.v_elems, self.copy_elems) < 0 or self.heads < 1:
            raise CapacityError(
                f"a group of layers with negative sizes or without heads: {self}"
                "; give sizes of at least 0 and one head or more"
            )
        if not self.part:
            object.__setattr__(self, "part", _PARTS[self.kind])

    @property
    def k_row_bytes(self) -> int:
        return row_bytes(self.type_k, self.k_elems)

    @property
    def v_row_bytes(self) -> int:
        return row_bytes(self.type_v, self.v_elems)

    @property
    def is_windowed(self) -> bool:
        return self.kind in (LayerKind.WINDOWED, LayerKind.CHUNKED) and self.window > 0

    def cells(self, n_ctx: int) -> int:
        """Rows that a layer keeps of one sequence of `n_ctx` tokens."""
        if self.kind is LayerKind.SHARED:
            return 0
        if self.kind is LayerKind.RECURRENT:
            return 1
        return min(n_ctx, self.window) if self.is_windowed else n_ctx

    def bytes(self, n_ctx: int) -> int:
        """Ideal bytes of the group for one sequence."""
        return self.count * self.cells(n_ctx) * (self.k_row_bytes + self.v_row_bytes)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """All layers of a model. Sizes in bytes, contexts in tokens."""

    groups: tuple[LayerGroup, ...]

    def stored_as(self, type_k: str, type_v: str) -> KVGeometry:
        """The same layers with these storage types; recurrent states stay f32, as engines keep them."""
        return KVGeometry(
            tuple(g if g.kind is LayerKind.RECURRENT else replace(g, type_k=type_k, type_v=type_v) for g in self.groups)
        )

    def parts(self) -> tuple[str, ...]:
        """Names of the caches, in order of first use."""
        return tuple(dict.fromkeys(g.part for g in self.groups if g.kind is not LayerKind.SHARED and g.count))

    def bytes(self, n_ctx: int, sequences: int = 1) -> int:
        """Ideal bytes of `sequences` sequences of `n_ctx` tokens each."""
        return sequences * sum(g.bytes(n_ctx) for g in self.groups)

    def marginal_bytes(self, n_ctx: int | None = None) -> int:
        """Bytes that token `n_ctx` + 1 of a sequence adds; without `n_ctx`, once all windows are full."""
        growing = (g for g in self._per_token() if not g.is_windowed or (n_ctx is not None and n_ctx < g.window))
        return sum(g.count * (g.k_row_bytes + g.v_row_bytes) for g in growing)

    def inverse(self, budget: int, limit: int) -> int:
        """The largest context of one sequence, at most `limit`, whose ideal bytes fit `budget`; 0 when none does."""
        left = budget - self.bytes(0)
        if left < 0:
            return 0
        at = 0
        for knee in [*sorted({g.window for g in self._per_token() if g.is_windowed and g.window < limit}), limit]:
            slope = self.marginal_bytes(at)
            if left < slope * (knee - at):
                return at + left // slope
            left -= slope * (knee - at)
            at = knee
        return limit

    def _per_token(self) -> Iterable[LayerGroup]:
        return (g for g in self.groups if g.kind not in (LayerKind.SHARED, LayerKind.RECURRENT))
