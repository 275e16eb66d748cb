"""How what a report shows can be done again: command lines, as far as the log tells what was asked.

A log has no paths and no prompts. What it cannot tell stands in capitals: LOG, TEXT, CHAT, COSTS, MODEL.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvtape.planner.rows import RunRow, SessionRow

__all__ = ["COSTS_OF_OTHERS", "EQUALITY", "RECORD", "ROOFLINE", "config_of", "made_by", "repeated"]

RECORD: Final = "kvtape record --text FILE --log L"
"""What makes a log that has everything a report can show."""

COSTS_OF_OTHERS: Final = "what would other policies cost?"
EQUALITY: Final = "does an engine hold the same?"
"""What `repeated` has commands for where there are sessions, or engines."""

_RECORD: Final = {
    "backend": "--backend",
    "policy": "--policy",
    "n_ctx": "--n-ctx",
    "memory": "--memory",
    "chunk": "--chunk",
    "threads": "--threads",
    "decode": "--decode",
    "cold_tokens": "--cold-tokens",
    "cold_bytes": "--cold-bytes",
    "kv_type": "--kv-type",
    "flash": "--flash",
    "score_every": "--score-every",
    "speculation": "--speculate",
}
_SIMULATE: Final = {
    "policy": "--policy",
    "n_ctx": "--n-ctx",
    "block": "--block",
    "cold_tokens": "--cold-tokens",
    "slots": "--slots",
    "memory_bytes": "--memory",
    "link_bytes_per_s": "--link",
    "arrivals": "--arrivals",
    "pace": "--pace",
}
_ENGINES: Final = ("llama", "openvino", "reference")
ROOFLINE: Final = "flops=1e12,bytes_per_s=5e10,params=1e9,weight_bytes=1e9,row_bytes=32768"
"""For logs without times of an engine; whoever uses it puts the numbers of a machine and a model in."""


def config_of(run: RunRow) -> Mapping[str, Any]:
    """The run's configuration; empty where it is none that can be read."""
    try:
        said = json.loads(run.config)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def made_by(run: RunRow, sessions: Sequence[SessionRow]) -> str | None:
    """The command that made a run. None for one whose configuration does not tell (imports, servers, evaluations)."""
    config = config_of(run)
    content = any(session.content for session in sessions)
    model = next((session.model_name for session in sessions if session.model_name), "MODEL")
    if config.get("verb") == "demo":
        return f"kvtape demo --model {shlex.quote(model)} --out NEW"
    if config.get("verb") == "record":
        return _record(config, model, content=content)
    if config.get("verb") == "simulate":
        return _simulate(config)
    return None


def repeated(
    log: str,
    sessions: Sequence[SessionRow],
    results: Sequence[str] = (),
    runs: Sequence[str] = (),
    only: Sequence[str] = (),
) -> dict[str, str]:
    """What is asked of a log, by what it is for; `log` and `results` are names of files, `runs` and `only` ids of runs
    and sessions that were named.
    """
    place = shlex.quote(log)
    given = "".join(f" --with {shlex.quote(name)}" for name in results)
    named = "".join(f" {shlex.quote(run)}" for run in runs)
    named += "".join(f" --session {shlex.quote(session)}" for session in only)
    engines = [b for b in dict.fromkeys(s.backend for s in sessions) if b in _ENGINES]
    found = {
        "this report": f"kvtape report {place}{named}{given} --out report.html",
        "is it what was written?": f"kvtape verify {place}",
    }
    if engines:
        on = " ".join(f"--on {engine}" for engine in engines)
        found[EQUALITY] = f"kvtape replay {place} {on} --json > replay.json"
    if sessions:
        learnt = f"kvtape calibrate {place}" if engines else f"kvtape calibrate --roofline {ROOFLINE}"
        found[COSTS_OF_OTHERS] = (
            f"{learnt} --out costs.json\n"
            f"kvtape whatif {place} --costs costs.json --policy none --policy stream --policy class "
            f"--budget {_budget(sessions)} --json > whatif.json"
        )
    return found


def _budget(sessions: Sequence[SessionRow]) -> int:
    """Half of the largest context, which forces a choice; 1024 tokens where none is known."""
    largest = max((s.n_ctx or 0 for s in sessions), default=0)
    return max(largest // 2, 2) if largest else 1024


def _record(config: Mapping[str, Any], model: str, *, content: bool) -> str:
    words = ["kvtape", "record", "--model", model, *_flags(config, _RECORD)]
    words += ["--content"] if content else []
    words += ["--score-all"] if config.get("score_every") is not None else []
    words += ["--defer-prefill", "on"] if config.get("defer_prefill") else []
    words += [
        option for name, option in (("uncertified", "--uncertified"), ("isolate", "--isolate")) if config.get(name)
    ]
    return shlex.join([*words, "--log", "NEW"]) + " --text TEXT (or --chat CHAT)"


def _simulate(config: Mapping[str, Any]) -> str:
    settings = config.get("settings")
    flags = _flags(settings, _SIMULATE) if isinstance(settings, dict) else []
    if isinstance(settings, dict):
        flags += [] if settings.get("affinity", True) else ["--no-affinity"]
        flags += ["--link-latency", f"{settings['link_latency_ns'] / 1e6:g}"] if settings.get("link_latency_ns") else []
        for failure in settings.get("slot_failures") or ():
            slot = "" if failure.get("slot") is None else f":{failure['slot']}"
            flags += ["--slot-dies", f"{failure['at_ns'] / 1e9:g}{slot}"]
    return shlex.join(["kvtape", "simulate", "LOG", "--costs", "COSTS", *flags, "--log", "NEW"])


def _flags(config: Mapping[str, Any], options: Mapping[str, str]) -> list[str]:
    given = [(option, config.get(name)) for name, option in options.items()]
    return [word for option, value in given if value is not None for word in (option, str(value))]
