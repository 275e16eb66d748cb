"""What the values of options can be: for a shell to complete, without loading what knows them better.

Names whose registries take long to import stand here a second time; a test holds them against these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = [
    "BACKENDS",
    "CAPACITY_ENGINES",
    "EXPORTS",
    "IMPORTS",
    "KV_ENGINES",
    "KV_TYPES",
    "SPECULATIONS",
    "WORDS",
    "run_ids",
    "session_ids",
    "values",
]

BACKENDS: Final = ("llama", "openvino", "reference")
KV_ENGINES: Final = (
    "standard",
    "no-cache",
    "markov-rs",
    "windowed-checkpoint",
    "turbo-quant",
    "boundary-kv",
    "markov-rs-codec",
    "boundary-per-layer",
    "apollo",
)
IMPORTS: Final = (
    "auto",
    "mooncake",
    "bailian",
    "azure",
    "burstgpt",
    "vidur",
    "aiperf",
    "weka",
    "tracelab",
    "tracelab-replay",
    "llmservingsim",
    "dynamo",
    "tair",
    "otel",
    "kv-events",
    "llama-server",
    "kvtape-jsonl",
)
CAPACITY_ENGINES: Final = ("llama.cpp", "openvino", "openvino-cb")
KV_TYPES: Final = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl", "u8")
SPECULATIONS: Final[dict[str, tuple[str, ...]]] = {"lookup": ("ngram", "tokens"), "draft": ("model", "tokens")}
EXPORTS: Final = ("parquet", "jsonl", "mooncake", "bailian", "perfetto", "otlp", "oraclegeneral")

WORDS: Final[dict[str, tuple[str, ...]]] = {
    "--arrivals": ("open", "closed"),
    "--continue": ("text", "greedy"),
    "--defer-prefill": ("on", "off", "auto"),
    "--flash": ("on", "off", "auto"),
    "--force": ("text", "greedy"),
    "--in-flight": ("held", "none"),
    "--kv-type-k": KV_TYPES,
    "--kv-type-v": KV_TYPES,
    "--memory": ("auto",),
    "--prefix": ("longest", "any"),
    "--rules": ("kvtape", "kvcache-simulator", "libcachesim"),
    "--task": ("needle", "nll", "batching"),
    "--weighting": ("token", "block"),
}
"""Options with a few words to choose from."""

# What a shell may be handed: a log is not trusted, and zsh reads some of what it is given once more.
_HARMLESS = re.compile(r"[\w./@+-]+", re.ASCII)

_BY_VERB: Final = {
    ("export", "--format"): EXPORTS,
    ("eval", "--format"): ("plain", "chat"),
    ("", "--shell"): ("bash", "fish", "zsh"),
    ("capacity", "--engine"): CAPACITY_ENGINES,
    ("capacity", "--kv-type"): KV_TYPES,
    ("run", "--engine"): KV_ENGINES,
    ("bench", "--engine"): KV_ENGINES,
}


def values(verb: str, option: str, begun: str, arguments: Sequence[str]) -> list[str]:
    """What the value of `option` may be that begins with `begun`; `arguments`: those of the verb so far.

    A spec is completed part by part: `str` to `stream:`, `stream:si` to `stream:sink=`.
    """
    known = _BY_VERB.get((verb, option)) or WORDS.get(option)
    if known is not None:
        return _beginning(known, begun)
    if option == "--format":
        return _beginning(IMPORTS, begun)
    if option in ("--backend", "--on"):
        return _spec(begun, dict.fromkeys(BACKENDS, ("threads", "way") if option == "--on" else ()))
    if option == "--kv-type":
        keys, slash, last = begun.rpartition("/")
        return [f"{keys}{slash}{found}" for found in _beginning(KV_TYPES, last)]
    if option == "--speculate":
        return _spec(begun, SPECULATIONS)
    if option in ("--policy", "--comparator"):
        return _policies(verb, begun)
    if option in ("--session", "--run"):
        ids = session_ids if option == "--session" else run_ids
        return _beginning([found for log in arguments for found in ids(Path(log))], begun)
    return []


def session_ids(log: Path) -> list[str]:
    """The sessions that were acknowledged, from the head file of a log or of each segment of a log folder."""
    return sorted({session for _, session in _sessions(log)})


def run_ids(log: Path) -> list[str]:
    return sorted({run for run, _ in _sessions(log)})


def _sessions(log: Path) -> list[tuple[str, str]]:
    heads = sorted(log.glob("*.head.json")) if log.is_dir() else [log.with_name(f"{log.name}.head.json")]
    found = []
    for head in heads:
        try:
            sessions: dict[str, Any] = json.loads(head.read_bytes())["sessions"]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # nothing to complete from; the verb itself will say what is wrong
        found += [(run, session) for run, _, session in (key.partition("/") for key in sessions)]
    return [pair for pair in found if all(_HARMLESS.fullmatch(name) for name in pair)]


def _policies(verb: str, begun: str) -> list[str]:
    if verb == "curve":
        from kvtape.sim.blocks.policies.registry import POLICY_NAMES

        return _beginning(POLICY_NAMES, begun)
    from kvtape.planner.policy_options import OPTIONS

    allowed = {name: tuple(OPTIONS[name]) for name in OPTIONS if name != "user"}
    found = _spec(begun, allowed)
    return found or _words_of(begun, OPTIONS)


def _words_of(begun: str, options: Any) -> list[str]:
    """The words that an option of a policy takes: `class:hole=` to `class:hole=refill`."""
    before, equals, word = begun.rpartition("=")
    name, _, keys = before.partition(":")
    option = options.get(name, {}).get(re.split(r"[:,]", keys)[-1]) if equals else None
    if option is None:
        return []
    if option.kind is bool:
        return [f"{before}={w}" for w in _beginning(("yes", "no"), word)]
    return [f"{before}={w}" for w in _beginning(option.allowed or (), word)] if option.kind is str else []


def _spec(begun: str, options: dict[str, tuple[str, ...]]) -> list[str]:
    name, colon, rest = begun.partition(":")
    if not colon:
        return [f"{found}:" if options[found] else found for found in _beginning(options, name)]
    given, comma, last = rest.rpartition(",")
    if "=" in last:
        return []
    used = {part.partition("=")[0] for part in given.split(",")}
    return [f"{name}:{given}{comma}{key}=" for key in _beginning(options.get(name, ()), last) if key not in used]


def _beginning(words: Iterable[Any], begun: str) -> list[str]:
    return [str(word) for word in words if str(word).startswith(begun)]
