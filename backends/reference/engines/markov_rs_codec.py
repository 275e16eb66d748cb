"""`markov-rs-codec`: `markov-rs` whose cold rows are bf16.

Contract: bounded KL. Bit-identical to `standard` while everything is within the window, and through the whole prefill,
whatever its length; after that old rows are what bf16 left of them (8 bits of mantissa, 2^-8 of a component at most).
On SmolLM2 a step's mean KL from `standard` stays below KL_BOUND: `docs/engines.md` has the measurement.

A row is encoded once, when it leaves the window. Memory: 2 n_embd bytes a cold row and layer, half of `markov-rs`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.codec_policy import parse_codec_policy
from kvtape.backends.reference.engines.engine import Contract, EngineInfo
from kvtape.backends.reference.engines.residual_engine import ResidualEngine
from kvtape.planner.grammar import Option, OptionValue

__all__ = ["ENTRY", "KL_BOUND"]

KL_BOUND: Final = 1e-4
"""Mean KL from `standard` over the steps behind a prompt, in nats."""


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> ResidualEngine:
    return ResidualEngine(replace(info, bound=KL_BOUND), int(options["window"] or 0), parse_codec_policy("bf16"))


ENTRY = EngineEntry(
    name="markov-rs-codec",
    options={"window": Option(int, 512, (1, None))},
    contract=Contract.BOUNDED_KL,
    make=_make,
    about="markov-rs with bf16 cold rows",
    quadratic=True,
    experimental=True,
)
