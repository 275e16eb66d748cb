"""How OpenVINO keeps a cache on CPU: the states of a stateful model, and the block pool of continuous batching.

Neither knows windows: every attention layer keeps every row (windowed layers mask them). Quantised rows carry a scale
and a zero point of 4 bytes each: of every row and head, and for the pool's u8 keys of every channel of a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtape.capacity.allocation import CacheLine, Caches, CacheSettings, Cells
from kvtape.capacity.errors import CapacityError
from kvtape.capacity.geometry import KVGeometry, LayerGroup, LayerKind
from kvtape.capacity.widths import OPENVINO_BYTES

__all__ = ["OpenVinoRule", "PagedRule", "StatefulRule", "state_row_bytes"]

_SCALE_BYTES: Final = 8


def state_row_bytes(kv_type: str, elements: int, heads: int) -> int:
    """One token's keys or values of one layer. Raises CapacityError for a type the runtime does not keep."""
    width = OPENVINO_BYTES.get(kv_type)
    if width is None:
        known = ", ".join(sorted(OPENVINO_BYTES))
        raise CapacityError(f"OpenVINO does not keep a cache as {kv_type!r}; choose from {known}")
    if not elements:
        return 0
    return elements * width + (_SCALE_BYTES * heads if kv_type == "u8" else 0)


@dataclass(frozen=True, slots=True)
class OpenVinoRule:
    """What both have in common. Slots never share: each has rows of its own, `n_ctx // slots` tokens at most."""

    version: str = "2026.4"
    growth: int = 1

    @property
    def name(self) -> str:
        raise NotImplementedError

    def context_step(self, settings: CacheSettings) -> int:
        return settings.slots

    def caches(self, geometry: KVGeometry, settings: CacheSettings) -> Caches:
        """See `EngineRule.caches`; `unified`, batches, windows and `swa_full` mean nothing here."""
        lines = []
        for group in geometry.groups:
            if group.kind is not LayerKind.SHARED and group.count:
                k, v = self._rows(group)
                part = "full" if group.is_windowed else group.part
                lines.append(CacheLine(part, group, group.count * k, group.count * v))
        slots = settings.slots

        def cells(n_ctx: int) -> Cells:
            each = -(-n_ctx // slots)
            rows = [1 if line.group.kind is LayerKind.RECURRENT else self._cells(each) for line in lines]
            return Cells(n_ctx, each, [(n, slots) for n in rows])

        return Caches(tuple(lines), cells, self.growth)

    def _cells(self, n_ctx: int) -> int:
        return n_ctx

    def _rows(self, group: LayerGroup) -> tuple[int, int]:
        k = state_row_bytes(group.type_k, group.k_elems, group.heads)
        return k, state_row_bytes(group.type_v, group.v_elems, group.heads)


@dataclass(frozen=True, slots=True)
class StatefulRule(OpenVinoRule):
    """KV states of an `InferRequest`: a row for every token, in buffers that double when they are full (measured)."""

    growth: int = 2

    @property
    def name(self) -> str:
        return f"openvino@{self.version}"

    @property
    def text(self) -> str:
        """The rule in words."""
        return (
            "one row a token in the model's states, whose buffers double when full, so memory for twice the rows is "
            "needed; u8 rows carry a scale and a zero point for each head"
        )


@dataclass(frozen=True, slots=True)
class PagedRule(OpenVinoRule):
    """Blocks of 32 tokens in the pool of the continuous-batching scheduler."""

    block: int = 32

    @property
    def name(self) -> str:
        return f"openvino-cb@{self.version}"

    @property
    def text(self) -> str:
        """The rule in words."""
        return f"blocks of {self.block} tokens; u8 keys carry a scale and a zero point for each channel of a block"

    def context_step(self, settings: CacheSettings) -> int:
        return self.block * settings.slots

    def _cells(self, n_ctx: int) -> int:
        return -(-n_ctx // self.block) * self.block

    def _rows(self, group: LayerGroup) -> tuple[int, int]:
        k, v = OpenVinoRule._rows(self, group)
        if group.type_k == "u8" and group.k_elems:
            k = group.k_elems + group.k_elems * _SCALE_BYTES // self.block
        return k, v
