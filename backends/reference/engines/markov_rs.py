"""`markov-rs`: each layer's input residual rows, from which its keys and values follow. A residual is a Markov state.

Contract: exact, bit-identical to `standard`, with a window too. `window=N` keeps the last N rows hot, that is with
their keys and values at hand; older rows go to a cold tier of plain residual rows, whose keys and values are made anew
at every step. The cold tier is attended like the hot one: a window bounds hot memory, never attention.

Refuses at prefill a model whose keys and values do not follow from residual row and position: by name (stateful norm,
learned positions, latent attention), and by measurement on the last row of every layer.

Memory: n_embd floats a row and layer, and for hot rows their keys and values. A step holds one layer's keys and values
of all rows while it runs; a prefill holds those of all layers, until the rows past the window are let go at its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.codec_policy import parse_codec_policy
from kvtape.backends.reference.engines.engine import Contract, EngineInfo
from kvtape.backends.reference.engines.residual_engine import ResidualEngine
from kvtape.planner.grammar import Option, OptionValue

__all__ = ["ENTRY"]


def _make(info: EngineInfo, options: Mapping[str, OptionValue]) -> ResidualEngine:
    window = int(options["window"] or 0)
    # Cold rows are projected anew at every step: with a window a step costs the whole context.
    return ResidualEngine(replace(info, quadratic=bool(window)), window, parse_codec_policy("f32"))


ENTRY = EngineEntry(
    name="markov-rs",
    aliases={"markov-residual": "markov-rs"},
    options={"window": Option(int, None, (1, None))},
    contract=Contract.EXACT,
    make=_make,
    about="residual rows instead of keys and values; a window bounds hot memory, not attention",
)
