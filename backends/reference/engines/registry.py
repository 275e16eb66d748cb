"""The engines by spec, `name[:key=value[,key=value]*]`: names are case-sensitive, whatever is unknown is an error.

An engine is a module of this folder with an `ENTRY`; adding one is adding its module to `_MODULES`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtape.backends.errors import UsageError
from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.engine import EngineInfo, KvEngine, RetrievalEngine
from kvtape.planner.grammar import OptionValue, Spec, SpecError, choose_name, parse_options, parse_spec

__all__ = ["EngineChoice", "engine_entries", "engine_names", "make_engine", "parse_engine"]

_MODULES: Final = (
    "standard",
    "no_cache",
    "markov_rs",
    "windowed_checkpoint",
    "turbo_quant",
    "boundary_kv",
    "markov_rs_codec",
    "boundary_per_layer",
    "apollo",
)
"""In the order of lists: the reference first."""


@dataclass(frozen=True, slots=True)
class EngineChoice:
    """A spec that was understood. `options` in the entry's order, defaults filled in."""

    entry: EngineEntry
    options: Mapping[str, OptionValue]

    @property
    def spec(self) -> str:
        """Canonical text: the entry's name, and the options that are not at their default."""
        given = {k: v for k, v in self.options.items() if v != self.entry.options[k].default}
        text = ",".join(f"{key}={_written(value)}" for key, value in given.items())
        return f"{self.entry.name}:{text}" if text else self.entry.name


def parse_engine(text: str) -> EngineChoice:
    """Raises UsageError for an unknown name, an unknown key or a value that does not fit; it lists what is allowed."""
    try:
        spec = parse_spec(text)
        entries = {entry.name: entry for entry in engine_entries()}
        aliases = {alias: target for entry in entries.values() for alias, target in entry.aliases.items()}
        name = choose_name("engine", spec.name, [*entries, *aliases])
        if name in aliases:
            spec = _resolved(name, parse_spec(aliases[name]), spec)
        entry = entries[spec.name]
        return EngineChoice(entry, parse_options(spec, entry.options))
    except SpecError as err:
        raise UsageError(str(err)) from None


def make_engine(choice: EngineChoice) -> KvEngine | RetrievalEngine:
    """A new engine without a session. Raises UsageError for options that do not go together."""
    entry = choice.entry
    info = EngineInfo(
        entry.name, choice.spec, entry.contract, entry.quadratic, entry.experimental, bench_only=entry.bench_only
    )
    return entry.make(info, choice.options)


def _resolved(alias: str, target: Spec, given: Spec) -> Spec:
    """What the alias stands for, with the options given beside it. An option that the alias fixes may not be given."""
    fixed = [key for key, _ in given.args if key in dict(target.args)]
    if fixed:
        raise SpecError(f"{alias} is {target}, so {fixed[0]}= cannot be given; write {target.name}:{fixed[0]}=...")
    return Spec(target.name, (*target.args, *given.args), given.target)


def _written(value: OptionValue) -> str:
    return ("no", "yes")[value] if isinstance(value, bool) else str(value)


@functools.cache
def engine_entries() -> tuple[EngineEntry, ...]:
    """All that the parser accepts, in the order of lists."""
    return tuple(importlib.import_module(f"kvtape.backends.reference.engines.{name}").ENTRY for name in _MODULES)


def engine_names() -> list[str]:
    """Names and aliases, sorted."""
    return sorted(name for entry in engine_entries() for name in (entry.name, *entry.aliases))
