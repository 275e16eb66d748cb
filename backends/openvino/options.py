"""What a session asks for, made into what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtape.backends.asked import check_sizes, effective_n_ctx, read_options
from kvtape.backends.errors import UsageError
from kvtape.backends.openvino.compiled import KV_TYPES, Profile
from kvtape.backends.protocol import SessionConfig
from kvtape.planner.specs import Option

__all__ = ["Resolved", "read_openvino_options", "resolve"]

_OPTIONS = {
    "kv": Option(str, "auto", ("auto", "asked")),
    "mirror": Option(str, "on", ("on", "off")),
    "scores": Option(str, "off", ("on", "off")),
}
"""`kv`: `auto` stores f32 whatever was asked (the session's `config` shows it); `asked` stores what was asked or
refuses. `mirror`: keep the host copy of all rows, which native eviction and the cold store need. `scores`: show queries
and account for the attention that rows receive; needs the host copy's keys.
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


def resolve(asked: SessionConfig, defaults: Mapping[str, str]) -> Resolved:
    """`defaults` are the engine's options; the session's own win. Raises UsageError."""
    options = read_openvino_options({**defaults, **asked.options})
    check_sizes(asked)
    if options["scores"] == "on" and options["mirror"] == "off":
        raise UsageError("openvino takes attention scores from the host copy of the keys: scores=on needs mirror=on")
    k, v = _kv_types(asked, options["kv"])
    # OpenVINO has no flash attention to switch on or off.
    config = replace(asked, kv_type_k=k, kv_type_v=v, flash_attention=False, options=options)
    return Resolved(config, effective_n_ctx(asked.n_ctx), options["mirror"] == "on", options["scores"] == "on")


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
