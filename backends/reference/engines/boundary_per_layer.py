"""`boundary-per-layer`: `markov-rs` whose cold rows are written by a codec of each layer's own.

Contract: bounded KL. Layers do not bear the same error equally well, so each may have its codec: `codecs=q8_0x12+bf16`
writes the first twelve layers' rows as q8_0 and all others as bf16. Exact in the window and through the prefill, as
`markov-rs-codec` is. With q8_0 in every layer, the default, a step's mean KL from `standard` stays below KL_BOUND on
SmolLM2; other codecs state no bound. `docs/engines.md` has the measurement, and that of each layer by itself.

Refuses at prefill codecs that name another number of layers than the model has. Memory: see `row_codecs` for the bytes
of a cold row.
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

KL_BOUND: Final = 1e-2
"""Mean KL from `standard` over the steps behind a prompt, in nats, with the default codecs."""

_CODECS: Final = Option(str, "q8_0")


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> ResidualEngine:
    codecs = str(options["codecs"])
    info = replace(info, bound=KL_BOUND if codecs == _CODECS.default else None)
    return ResidualEngine(info, int(options["window"] or 0), parse_codec_policy(codecs))


ENTRY = EngineEntry(
    name="boundary-per-layer",
    options={"window": Option(int, 512, (1, None)), "codecs": _CODECS},
    contract=Contract.BOUNDED_KL,
    make=_make,
    about="markov-rs with a codec for the cold rows of each layer",
    quadratic=True,
    experimental=True,
)
