"""Which KV engine `kvtape run` takes: flag over environment over `standard`, and what the older flags stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvtape.backends.errors import UsageError
from kvtape.backends.reference.engines.registry import EngineChoice, parse_engine
from kvtape.planner.grammar import SpecError, choose_name

__all__ = ["DEFAULT", "KV_CACHES", "VARIABLE", "Chosen", "chosen_engine"]

VARIABLE: Final = "KVTAPE_KV_ENGINE"
DEFAULT: Final = "standard"
KV_CACHES: Final = ("standard", "markov-bounded", "none")


@dataclass(frozen=True, slots=True)
class Chosen:
    """`source`: where the spec came from, as a user would name it. `warning`: what was given and not taken."""

    choice: EngineChoice
    source: str
    warning: str | None = None


def chosen_engine(
    engine: str | None, kv_cache: str | None, context_window: int | None, environment: Mapping[str, str]
) -> Chosen:
    """The engine of a session. The variable is read only where no flag is given, and an empty one is none.

    Raises UsageError for an unknown spec or kind of cache, flags that do not go together, and an engine that is for
    `bench` alone: no other is taken in its place.
    """
    mapped = None if kv_cache is None else _mapped(kv_cache, context_window)
    if context_window is not None and kv_cache != "markov-bounded":
        instead = f"--engine standard:window={context_window}"
        raise UsageError(f"--context-window is read by --kv-cache markov-bounded alone; write {instead}")
    if engine is not None:
        ignored = None if mapped is None else f"--kv-cache {kv_cache} is not taken: --engine {engine} stands above it"
        return _session(Chosen(parse_engine(engine), "--engine", ignored))
    if mapped is not None:
        return _session(Chosen(parse_engine(mapped), "--kv-cache"))
    if environment.get(VARIABLE):
        return _session(Chosen(_from_environment(environment[VARIABLE]), VARIABLE))
    return Chosen(parse_engine(DEFAULT), "default")


def _mapped(kv_cache: str, context_window: int | None) -> str:
    try:
        choose_name("kind of --kv-cache", kv_cache, KV_CACHES)
    except SpecError as err:
        raise UsageError(str(err)) from None
    if kv_cache == "markov-bounded":
        if context_window is None:
            raise UsageError("--kv-cache markov-bounded needs --context-window N, the rows that a token attends to")
        return f"standard:window={context_window}"
    return "no-cache" if kv_cache == "none" else kv_cache


def _from_environment(text: str) -> EngineChoice:
    try:
        return parse_engine(text)
    except UsageError as err:
        raise UsageError(f"{VARIABLE}: {err}") from None


def _session(chosen: Chosen) -> Chosen:
    name = chosen.choice.entry.name
    if chosen.choice.entry.bench_only:
        raise UsageError(f"{chosen.source}: {name} is bench only, it carries no session; kvtape bench --engine {name}")
    return chosen
