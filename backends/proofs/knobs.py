"""What a precision knob is: its name, what needs no proof, and the command that would prove it.

Base precisions need no row: they are what everything else is measured against. llama.cpp: f16 and f32 rows without
flash attention. OpenVINO: f32 rows and f32 inference. Backends without a knob (reference, modelled, others') are base.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Final

from kvtape.backends.protocol import ModelFacts, SessionConfig

__all__ = ["BASE", "Precision", "certify_command", "precision_subject"]


@dataclass(frozen=True, slots=True)
class Precision:
    """What is known of a session's knob. `subject` None: a base precision.

    `withheld`: capabilities that the knob may not use, with the reason.
    """

    subject: str | None
    certified: bool
    withheld: dict[str, str] = field(default_factory=dict)

    @property
    def detail(self) -> str | None:
        """For the open event, as JSON: `{"precision": subject, "certified": ...}`; None of a base precision."""
        if self.subject is None:
            return None
        return json.dumps({"certified": self.certified, "precision": self.subject}, sort_keys=True)


BASE: Final = Precision(None, certified=False)
"""A precision that needs no proof."""


def precision_subject(engine: str, config: SessionConfig) -> str | None:
    """The knob of an effective configuration as text, `k=q8_0,v=q8_0,fa=on`; None for a base precision."""
    k, v = config.kv_type_k, config.kv_type_v
    if engine == "llama":
        flash = _flash(config.flash_attention)
        return None if {k, v} <= {"f16", "f32"} and flash == "off" else f"k={k},v={v},fa={flash}"
    if engine == "openvino":
        return None if (k, v) == ("f32", "f32") else f"k={k},v={v}"
    return None


def certify_command(engine: str, facts: ModelFacts, config: SessionConfig) -> str:
    """The command that would certify this knob."""
    k, v = config.kv_type_k, config.kv_type_v
    kv = k if k == v else f"{k}/{v}"
    flash = f" --flash {_flash(config.flash_attention)}" if engine == "llama" else ""
    return f"kvtape certify --model {facts.path} --backend {engine} --kv-type {kv}{flash}"


def _flash(value: bool | str) -> str:
    return value if isinstance(value, str) else "on" if value else "off"
