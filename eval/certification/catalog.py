"""The knobs of each engine: which storage types of keys and values, with or without flash attention, are certified.

What an engine refuses or dies of is in the lists too: a row says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from kvtape.backends.errors import UsageError
from kvtape.backends.proofs.knobs import knob_text
from kvtape.backends.protocol import FlashAttention, SessionConfig
from kvtape.planner.grammar import nearest

__all__ = ["BASES", "ENGINES", "FLASH", "Knob", "catalog", "chosen_knobs", "parse_kv_type"]

FLASH: Final[tuple[FlashAttention, ...]] = ("off", "on", "auto")

_SAME: Final = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
_MIXED: Final = (("q8_0", "f16"), ("f16", "q8_0"), ("q8_0", "q4_0"), ("f16", "bf16"))
_OPENVINO: Final = {
    "f32": ("f32", "f16", "u8", "f32/u8", "u8/f32", "bf16", "f16/u8", "u4", "u3", "i8"),
    "bf16": ("bf16", "u8", "bf16/u8", "u8/bf16"),
}
"""By the type that is computed in: what the engine keeps, and then what it does not."""


@dataclass(frozen=True, slots=True)
class Knob:
    """Storage of keys and values as asked; `flash` off, on or auto where the engine has it, else None.

    `options` go to the engine with it.
    """

    engine: str
    k: str
    v: str
    flash: FlashAttention | None = None
    options: tuple[tuple[str, str], ...] = ()

    def config(self, base: SessionConfig) -> SessionConfig:
        """`base` with this knob, opened whether it is certified or not."""
        return replace(
            base,
            kv_type_k=self.k,
            kv_type_v=self.v,
            flash_attention=self.flash or base.flash_attention,
            uncertified=True,
            options={**base.options, **dict(self.options)},
        )

    @property
    def asked(self) -> str:
        """As text, before an engine has said what came of it."""
        return knob_text(self.engine, self.config(SessionConfig()))


def _llama(k: str, v: str, flash: FlashAttention) -> Knob:
    return Knob("llama", k, v, flash)


def _openvino(k: str, v: str, inference: str = "f32") -> Knob:
    return Knob("openvino", k, v, options=(("inference", inference), ("kv", "asked")))


BASES: Final[dict[str, Knob]] = {"llama": _llama("f32", "f32", "off"), "openvino": _openvino("f32", "f32")}
"""The best precision of each engine: what the others are compared with."""

ENGINES: Final = tuple(BASES)


def catalog(engine: str) -> tuple[Knob, ...]:
    """Every knob that is certified, the base first. Raises UsageError for an engine without knobs."""
    if engine == "llama":
        pairs = [*((t, t) for t in _SAME), *_MIXED]
        return tuple(_llama(k, v, flash) for k, v in pairs for flash in FLASH)
    if engine == "openvino":
        return tuple(_openvino(*parse_kv_type(kv), inference) for inference, kvs in _OPENVINO.items() for kv in kvs)
    raise UsageError(f"{engine} has no precision knob to certify; choose {' or '.join(ENGINES)}")


def chosen_knobs(
    engine: str, kv_types: Sequence[str], flash: Sequence[str] = (), inference: str | None = None
) -> tuple[Knob, ...]:
    """The catalog, or the asked types (`K` or `K/V`) with the asked settings of flash attention, all without one.

    `inference`: of OpenVINO, the type that is computed in; not said, bf16 where a type is bf16, else f32.

    Raises UsageError for a type that cannot be read or that the catalog does not know, and for flash attention where
    there is none.
    """
    if flash and engine != "llama":
        raise UsageError(f"--flash: {engine} has no flash attention to switch; leave it out")
    for value in flash:
        if value not in FLASH:
            raise UsageError(f"--flash {value!r}: choose {', '.join(FLASH)}")
    settings = tuple(known for known in FLASH if not flash or known in flash)
    every = catalog(engine)
    if not kv_types:
        wanted = None if inference is None else ("inference", inference)
        return tuple(
            k for k in every if (k.flash is None or k.flash in settings) and (wanted is None or wanted in k.options)
        )
    pairs = [parse_kv_type(text) for text in kv_types]
    names = list(dict.fromkeys(name for knob in every for name in (knob.k, knob.v)))
    if unknown := [name for pair in pairs for name in pair if name not in names]:
        hint = nearest(unknown[0], names)
        raise UsageError(f"--kv-type {unknown[0]}: no storage type of {engine}{hint} choose from {', '.join(names)}")
    if engine == "openvino":
        return tuple(_openvino(k, v, inference or ("bf16" if "bf16" in (k, v) else "f32")) for k, v in pairs)
    return tuple(_llama(k, v, setting) for k, v in pairs for setting in settings)


def parse_kv_type(text: str) -> tuple[str, str]:
    """`K` or `K/V` as a pair. Raises UsageError for anything else."""
    parts = text.split("/")
    if not 1 <= len(parts) <= 2 or not all(parts):
        raise UsageError(f"--kv-type {text!r}: write a type, or those of keys and values as K/V, like q8_0/f16")
    return parts[0], parts[-1]
