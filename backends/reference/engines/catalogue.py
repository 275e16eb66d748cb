"""One entry of the engine catalogue: how an engine is named, what it takes, what it promises, how it is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvtape.backends.reference.engines.engine import Contract, EngineInfo, KvEngine, RetrievalEngine
from kvtape.planner.grammar import Option, OptionValue

__all__ = ["EngineEntry", "MakeEngine"]

MakeEngine = Callable[[EngineInfo, Mapping[str, OptionValue]], KvEngine | RetrievalEngine]


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """`aliases`: other names, each with the spec that it stands for (`tq3` is `turbo-quant:bits=3`).

    `options`: all of them with kind, default and what is allowed, in the order of canonical text. `about`: one line.
    """

    name: str
    options: Mapping[str, Option]
    contract: Contract
    make: MakeEngine
    about: str
    aliases: Mapping[str, str] = field(default_factory=dict)
    quadratic: bool = False
    experimental: bool = False
    bench_only: bool = False
