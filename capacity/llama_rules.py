"""How llama.cpp sizes its caches, by build: rules as data, newest last.

Read from the sources of llama.cpp (MIT): `llama_context` for the context, `llama_kv_cache_iswa` for windowed layers,
`llama_memory_hybrid` and `llama_memory_recurrent` for states. The pull request of every change is in its rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvtape.capacity.allocation import CacheLine, Caches, CacheSettings, Cells
from kvtape.capacity.errors import CapacityError
from kvtape.capacity.geometry import KVGeometry, LayerGroup, LayerKind
from kvtape.capacity.widths import KV_TYPES, row_bytes

__all__ = ["LLAMA_RULES", "LlamaRule", "llama_rule"]

_MOST_SLOTS: Final = 256
_ATTENTION: Final = (LayerKind.GLOBAL, LayerKind.WINDOWED, LayerKind.CHUNKED, LayerKind.SHARED)


@dataclass(frozen=True, slots=True)
class LlamaRule:
    """`since`: the first build it holds for (`exact` False: placed by its date). `pull`: what brought it.

    `windows`: windowed layers have a cache of their own. `beside_window`: what it holds beside the windows.
    `per_stream`: separate slots have caches of their own. `padding`: contexts and caches are multiples of 256 with
    flash attention and of 32 without (`by_attention`), of nothing, or of 256. `pads_result`: the windowed cache is
    padded after it was bounded by the context, not before. `hybrid_n_ctx`: in a hybrid model every stream of the
    attention cache has the cells of the whole context. `latent_copy`: a latent cache has values too, a copy of a part
    of its keys.
    """

    since: int
    pull: str
    windows: bool = True
    beside_window: Literal["n_batch", "n_ubatch"] = "n_ubatch"
    per_stream: bool = True
    padding: Literal["by_attention", "none", "256"] = "by_attention"
    pads_result: bool = False
    hybrid_n_ctx: bool = True
    latent_copy: bool = True
    exact: bool = True

    @property
    def name(self) -> str:
        return f"llama.cpp@b{self.since}"

    @property
    def text(self) -> str:
        """The rule in words, with its source."""
        pad = {"by_attention": "pad256 (pad32 without flash attention)", "none": "unpadded", "256": "pad256"}
        cells = "windowed layers as full"
        if self.windows:
            times = "(slots if unified else 1)" if self.per_stream else "slots"
            window = f"window x {times} + {self.beside_window}"
            bounded = f"pad(min(context, {window}))" if self.pads_result else f"min(context, pad({window}))"
            cells = f"windowed cells {bounded}"
        hybrid = "; hybrid attention gets the whole context for every slot" if self.hybrid_n_ctx else ""
        latent = "; latent rows and a copy of their values" if self.latent_copy else ""
        placed = "" if self.exact else ", build placed by date"
        return f"{pad[self.padding]}; {cells}{hybrid}{latent} ({self.pull}{placed})"

    def context_step(self, settings: CacheSettings) -> int:
        """See `EngineRule.context_step`: every slot of its own is rounded up."""
        pad = self._pad(settings)
        return pad if settings.unified or not self.per_stream or pad == 1 else pad * settings.slots

    def caches(self, geometry: KVGeometry, settings: CacheSettings) -> Caches:
        """See `EngineRule.caches`. Raises CapacityError for what the engine refuses: too many slots, values stored in a
        block type without flash attention.
        """
        _check(geometry, settings)
        widest = max((g.v_elems for g in geometry.groups if g.kind in _ATTENTION), default=0)
        lines = []
        for group in geometry.groups:
            # Without flash attention values are stored transposed, one width for all layers.
            padded = not settings.flash_attention and group.v_elems and group.kind is not LayerKind.RECURRENT
            v = row_bytes(group.type_v, widest) if padded else group.v_row_bytes
            if group.kind is LayerKind.LATENT and self.latent_copy:
                v = row_bytes(group.type_v, group.copy_elems)
            part = group.part if self.windows or not group.is_windowed else "full"
            if group.kind is not LayerKind.SHARED and group.count:
                lines.append(CacheLine(part, group, group.count * group.k_row_bytes, group.count * v))
        hybrid = self.hybrid_n_ctx and any(line.group.kind is LayerKind.RECURRENT for line in lines)

        def cells(n_ctx: int) -> Cells:
            total, each, streams = self._context(n_ctx, settings)
            full = total if hybrid else each
            return Cells(total, each, [self._line_cells(line.group, n_ctx, full, streams, settings) for line in lines])

        return Caches(tuple(lines), cells)

    def _line_cells(
        self, group: LayerGroup, n_ctx: int, full: int, streams: int, settings: CacheSettings
    ) -> tuple[int, int]:
        if group.kind is LayerKind.RECURRENT:
            return settings.slots * (1 + settings.snapshots), 1
        if group.is_windowed and self.windows and not settings.swa_full:
            return self._windowed_cells(group, n_ctx, full, settings), streams
        return full, streams

    def _context(self, n_ctx: int, settings: CacheSettings) -> tuple[int, int, int]:
        """The engine's context, that of one sequence, and the streams of a cache."""
        pad, slots = self._pad(settings), settings.slots
        if settings.unified or not self.per_stream or slots == 1:
            total = _padded(n_ctx, pad)
            return total, total, 1
        if self.padding == "by_attention":
            each = _padded(-(-n_ctx // slots), pad)
        else:
            each = _padded(_padded(n_ctx, pad) // slots, pad)
        return each * slots, each, slots

    def _windowed_cells(self, group: LayerGroup, n_ctx: int, full: int, settings: CacheSettings) -> int:
        windows = settings.slots if settings.unified or not self.per_stream else 1
        n_batch = min(n_ctx, settings.n_batch)
        beside = n_batch if self.beside_window == "n_batch" else min(n_batch, settings.n_ubatch)
        pad, needed = self._pad(settings), group.window * windows + beside
        return _padded(min(full, needed), pad) if self.pads_result else min(full, _padded(needed, pad))

    def _pad(self, settings: CacheSettings) -> int:
        if self.padding == "by_attention":
            return 256 if settings.flash_attention else 32
        return 256 if self.padding == "256" else 1


LLAMA_RULES: Final = (
    LlamaRule(0, "before windowed caches", windows=False, per_stream=False),
    LlamaRule(5429, "#13194: windowed caches", beside_window="n_batch", per_stream=False),
    LlamaRule(5554, "#13833: a micro-batch beside the window", per_stream=False),
    LlamaRule(5913, "#14363: a cache for each slot"),
    LlamaRule(6868, "#16812: no padding", padding="none", exact=False),
    LlamaRule(6975, "#17046: padded to 256", padding="256", pads_result=True),
    LlamaRule(7825, "#19067: latent rows alone", padding="256", pads_result=True, latent_copy=False, exact=False),
    LlamaRule(
        8018,
        "#19559: hybrid models sized by slot",
        padding="256",
        pads_result=True,
        hybrid_n_ctx=False,
        latent_copy=False,
        exact=False,
    ),
)
"""Not in here: for two days of April 2026 windowed caches ignored the KV types (#21277, reverted by #21332)."""


def llama_rule(build: int | None = None) -> LlamaRule:
    """The rule that holds for this build; the newest without one."""
    if build is None:
        return LLAMA_RULES[-1]
    return next(rule for rule in reversed(LLAMA_RULES) if rule.since <= build)


def _check(geometry: KVGeometry, settings: CacheSettings) -> None:
    if settings.slots > _MOST_SLOTS:
        raise CapacityError(f"{settings.slots} slots; llama.cpp takes {_MOST_SLOTS} at most")
    unknown = sorted({t for g in geometry.groups for t in (g.type_k, g.type_v)} - set(KV_TYPES))
    if unknown:
        raise CapacityError(f"llama.cpp does not keep a cache as {unknown[0]!r}; choose from {', '.join(KV_TYPES)}")
    quantised = {g.type_v for g in geometry.groups if g.v_elems or g.copy_elems} - {"bf16", "f16", "f32"}
    if quantised and not settings.flash_attention:
        raise CapacityError(
            f"llama.cpp refuses values stored as {min(quantised)} without flash attention; turn it on, or store values "
            "as f16, bf16 or f32"
        )


def _padded(n: int, to: int) -> int:
    return -(-n // to) * to
