"""What a session asks for, made into what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtape.backends.asked import check_sizes, read_options
from kvtape.backends.errors import UsageError
from kvtape.backends.fit import MEMORY_OPTION, Need, fitted_context, read_memory
from kvtape.backends.openvino.compiled import KV_TYPES, Profile
from kvtape.backends.protocol import SessionConfig
from kvtape.capacity.allocation import CacheSettings
from kvtape.capacity.engines import Sizing
from kvtape.capacity.model import ModelShape
from kvtape.capacity.openvino_rules import StatefulRule
from kvtape.planner.specs import Option

__all__ = ["Resolved", "read_openvino_options", "resolve"]

_OPTIONS = {
    "memory": MEMORY_OPTION,
    "kv": Option(str, "auto", ("auto", "asked")),
    "mirror": Option(str, "on", ("on", "off")),
    "scores": Option(str, "off", ("on", "off")),
}
"""`kv`: `auto` stores f32 whatever was asked (the session's `config` shows it); `asked` stores what was asked or
refuses. `mirror`: keep the host copy of all rows, which native eviction and the cold store need. `scores`: show queries
and account for the attention that rows receive; needs the host copy's keys. `memory`: what weights, cache and host copy
must fit in; the context is then the largest that does, at most the one asked for.
"""

_ASKABLE = ("f16", "f32", "bf16")


@dataclass(frozen=True, slots=True)
class Resolved:
    """`config` holds the effective values; `n_ctx` the effective context in tokens."""

    config: SessionConfig
    n_ctx: int
    mirror: bool
    scores: bool

    @property
    def profile(self) -> Profile:
        return Profile(self.config.kv_type_k, self.config.kv_type_v, self.config.threads, queries=self.scores)


def read_openvino_options(given: Mapping[str, str]) -> dict[str, str]:
    """Defaults filled in. Raises UsageError that lists what is known."""
    return read_options("openvino", given, _OPTIONS)


def resolve(asked: SessionConfig, defaults: Mapping[str, str], model: ModelShape, *, loaded: bool = False) -> Resolved:
    """`defaults` are the engine's options; the session's own win. `loaded`: see `fit.fitted_context`.

    Raises UsageError, DoesNotFit for lack of memory.
    """
    options = read_openvino_options({**defaults, **asked.options})
    check_sizes(asked)
    if options["scores"] == "on" and options["mirror"] == "off":
        raise UsageError("openvino takes attention scores from the host copy of the keys: scores=on needs mirror=on")
    k, v = _kv_types(asked, options["kv"])
    # OpenVINO has no flash attention to switch on or off.
    config = replace(asked, kv_type_k=k, kv_type_v=v, flash_attention=False, options=options)
    mirror, scores = options["mirror"] == "on", options["scores"] == "on"
    need = _need(model, k, v, mirror=mirror, scores=scores)
    n_ctx = fitted_context(asked.n_ctx, read_memory(options["memory"]), need, loaded=loaded)
    return Resolved(config, n_ctx, mirror, scores)


def _need(model: ModelShape, k: str, v: str, *, mirror: bool, scores: bool) -> Need:
    """The states at their largest; of the host copy its rows and room for a quarter more; sums by head, float64."""
    settings = CacheSettings()
    states = Sizing(model.geometry.stored_as(k, v), StatefulRule(), settings)
    rows = Sizing(model.geometry.stored_as("f32", "f32"), StatefulRule(), settings)
    heads = model.n_layer * model.n_head if scores else 0

    def host(n_ctx: int) -> int:
        return (rows.total_bytes(n_ctx) * 5 // 4 if mirror else 0) + 8 * heads * n_ctx

    return Need(model.weights_bytes, states.peak_bytes, host)


def _kv_types(asked: SessionConfig, kv: str) -> tuple[str, str]:
    pair = (asked.kv_type_k, asked.kv_type_v)
    for kv_type in pair:
        if kv_type not in _ASKABLE:
            raise UsageError(f"openvino cannot store keys or values as {kv_type!r}; ask for {', '.join(_ASKABLE)}")
    if kv == "auto":
        return "f32", "f32"
    if pair[0] != pair[1] or pair[0] not in KV_TYPES:
        raise UsageError(
            f"openvino cannot store keys as {pair[0]} and values as {pair[1]} beside f32 inference; ask for the same "
            f"type for both, {' or '.join(KV_TYPES)}, or use kv=auto"
        )
    return pair
