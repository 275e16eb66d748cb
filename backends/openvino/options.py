"""What a session asks for, made into what it gets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvtape.backends.asked import check_sizes, read_options
from kvtape.backends.errors import UsageError
from kvtape.backends.fit import MEMORY_OPTION, Need, fitted_context, read_memory
from kvtape.backends.openvino.compiled import Profile
from kvtape.backends.openvino.storage import PAIRS
from kvtape.backends.protocol import SessionConfig
from kvtape.capacity.allocation import CacheSettings
from kvtape.capacity.engines import Sizing
from kvtape.capacity.model import ModelShape
from kvtape.capacity.openvino_rules import StatefulRule
from kvtape.capacity.widths import KV_TYPES
from kvtape.planner.specs import Option

__all__ = ["Resolved", "read_openvino_options", "resolve", "with_trained_context"]

_OPTIONS = {
    "memory": MEMORY_OPTION,
    "kv": Option(str, "auto", ("auto", "asked")),
    "inference": Option(str, "auto", ("auto", "bf16", "f32")),
    "mirror": Option(str, "on", ("on", "off")),
    "scores": Option(str, "off", ("on", "off")),
    "trained": Option(str, "auto"),
}
"""`kv`: `auto` stores f32 whatever was asked, other engines' types too (the session's `config` shows it), bf16 with
`inference=bf16`; `asked` stores what was asked or refuses. `inference`: the type that is computed in; `auto` is bf16
where keys or values are asked as bf16, which the engine keeps in no other way, else f32. `mirror`: keep the host copy
of all rows, which native eviction, the cold store and u8 need. `scores`: show queries and account for the attention
that rows receive; needs the host copy's keys. `memory`: what weights, cache and host copy must fit in; the context is
then the largest that does, at most the one asked for. `trained`: for how many tokens the model was trained, where its
folder does not say (`auto`: it does).
"""

_KEPT = ("bf16", "f16", "f32", "u8")

_WHY_NOT = {
    "u4": ": writing such rows back ends the process (heap corruption)",
    "u3": ": the CPU plugin takes the name and then refuses the model",
    "i8": ": the CPU plugin names it among what it knows and refuses it",
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """`config` holds the effective values; `n_ctx` the effective context in tokens."""

    config: SessionConfig
    n_ctx: int
    mirror: bool
    scores: bool
    inference: str = "f32"

    @property
    def profile(self) -> Profile:
        config = self.config
        return Profile(
            config.kv_type_k, config.kv_type_v, config.threads, queries=self.scores, inference=self.inference
        )


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
    inference = _inference(asked, options)
    k, v = _kv_types(asked, options["kv"], inference)
    if "u8" in (k, v) and options["mirror"] == "off":
        raise UsageError(
            "rows of u8 do not come out of OpenVINO as they went in, so what is carried to another request or saved "
            "would change: kv_type u8 needs mirror=on"
        )
    options["inference"] = inference
    # OpenVINO has no flash attention to switch on or off.
    config = replace(asked, kv_type_k=k, kv_type_v=v, flash_attention="off", options=options)
    mirror, scores = options["mirror"] == "on", options["scores"] == "on"
    need = _need(model, k, v, mirror=mirror, scores=scores)
    n_ctx = fitted_context(asked.n_ctx, read_memory(options["memory"]), need, loaded=loaded)
    return Resolved(config, n_ctx, mirror, scores, inference)


def with_trained_context(model: ModelShape, trained: str) -> ModelShape:
    """`model` with the option `trained`. Raises UsageError where nobody says, or both do and differ."""
    if trained == "auto":
        if not model.n_ctx_train:
            raise UsageError(
                f"{model.path}: the folder does not say for how many tokens the model was trained; put its config.json "
                "(max_position_embeddings) there, or say it with the backend: openvino:trained=N"
            )
        return model
    if not (trained.isascii() and trained.isdecimal() and int(trained) > 0):
        raise UsageError(f"trained={trained}: give a whole number of tokens, or auto")
    if model.n_ctx_train not in (0, int(trained)):
        raise UsageError(f"{model.path}: trained={trained}, but the model says {model.n_ctx_train}; leave it out")
    return replace(model, n_ctx_train=int(trained))


def _need(model: ModelShape, k: str, v: str, *, mirror: bool, scores: bool) -> Need:
    """The states at their largest; of the host copy its rows and room for a quarter more; sums by head, float64."""
    settings = CacheSettings()
    states = Sizing(model.geometry.stored_as(k, v), StatefulRule(), settings)
    rows = Sizing(model.geometry.stored_as("f32", "f32"), StatefulRule(), settings)
    heads = model.n_layer * model.n_head if scores else 0

    def host(n_ctx: int) -> int:
        return (rows.total_bytes(n_ctx) * 5 // 4 if mirror else 0) + 8 * heads * n_ctx

    return Need(model.weights_bytes, states.peak_bytes, host)


def _inference(asked: SessionConfig, options: Mapping[str, str]) -> str:
    if options["inference"] != "auto":
        return options["inference"]
    return "bf16" if options["kv"] == "asked" and "bf16" in (asked.kv_type_k, asked.kv_type_v) else "f32"


def _kv_types(asked: SessionConfig, kv: str, inference: str) -> tuple[str, str]:
    pair = (asked.kv_type_k, asked.kv_type_v)
    for kv_type in pair:
        if kv_type not in (_KEPT if kv == "asked" else (*_KEPT, *KV_TYPES)):
            raise UsageError(
                f"openvino cannot store keys or values as {kv_type!r}{_WHY_NOT.get(kv_type, '')}; ask for "
                f"{', '.join(_KEPT)}, or of llama.cpp's types with kv=auto, which stores {inference}"
            )
    if kv == "auto":
        return inference, inference
    if pair not in PAIRS[inference]:
        known = ", ".join("/".join(dict.fromkeys(some)) for some in PAIRS[inference])
        raise UsageError(
            f"openvino would keep keys as {pair[0]} and values as {pair[1]} in another type without saying so when it "
            f"computes in {inference}; there it really keeps {known} (keys/values), with inference="
            f"{'f32' if inference == 'bf16' else 'bf16'} others; or use kv=auto"
        )
    return pair
