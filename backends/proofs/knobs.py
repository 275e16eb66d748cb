"""What a precision knob is: its name, what needs no proof, and the command that would prove it.

Base precisions need no row: they are what everything else is measured against. llama.cpp: f16 and f32 rows without
flash attention. OpenVINO: f32 rows and f32 inference. Backends without a knob (reference, modelled, others') are base.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final

from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.planner.capabilities import Capabilities

__all__ = ["BASE", "BASE_TEXTS", "Precision", "asked_options", "certify_command", "knob_text", "precision_subject"]


@dataclass(frozen=True, slots=True)
class Precision:
    """What is known of a session's knob. `subject` None: a base precision.

    `withheld`: capabilities that the knob may not use, with the reason.
    """

    subject: str | None
    certified: bool
    withheld: dict[str, str] = field(default_factory=dict)

    def left_of(self, able: Capabilities) -> Capabilities:
        """What a session may use of what its backend can."""
        return replace(able, **dict.fromkeys(self.withheld, False)) if self.withheld else able


BASE: Final = Precision(None, certified=False)
"""A precision that needs no proof."""


BASE_TEXTS: Final = {
    "llama": tuple(f"k={k},v={v},fa=off" for k in ("f16", "f32") for v in ("f16", "f32")),
    "openvino": ("k=f32,v=f32",),
}
"""The base precisions of each engine that has a knob."""


def knob_text(engine: str, config: SessionConfig) -> str:
    """The precision of an effective configuration: `k=q8_0,v=f16,fa=on`, `k=u8,v=u8`, `k=u8,v=u8,inference=bf16`."""
    text = f"k={config.kv_type_k},v={config.kv_type_v}"
    if engine == "llama":
        return f"{text},fa={config.flash_attention}"
    inference = config.options.get("inference", "f32") if engine == "openvino" else "f32"
    return text if inference in ("auto", "f32") else f"{text},inference={inference}"


def precision_subject(engine: str, config: SessionConfig) -> str | None:
    """The knob that needs a proof, as `knob_text`; None for a base precision."""
    text = knob_text(engine, config)
    return None if engine not in BASE_TEXTS or text in BASE_TEXTS[engine] else text


def certify_command(engine: str, facts: ModelFacts, config: SessionConfig) -> str:
    """The command that would certify this knob."""
    backend, options = asked_options(engine, config)
    return f"kvtape certify --model {facts.path} --backend {backend}{options}"


def asked_options(engine: str, config: SessionConfig) -> tuple[str, str]:
    """How a command asks for the knob of an effective configuration: its `--backend`, and the options behind it."""
    k, v = config.kv_type_k, config.kv_type_v
    _, _, inference = knob_text(engine, config).partition(",inference=")
    flash = f" --flash {config.flash_attention}" if engine == "llama" else ""
    return (
        f"{engine}:inference={inference}" if inference else engine,
        f" --kv-type {k if k == v else f'{k}/{v}'}{flash}",
    )
