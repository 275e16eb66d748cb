"""The tables of `kvtape bench`: promises, distance from `standard`, speed and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtape.cli.engine_list import labels
from kvtape.cli.output import Section

__all__ = ["bench_sections"]

_DISTANCE = {
    "served_rate": "served",
    "match_rate": "match",
    "top_k_overlap": "top-{k}",
    "mean_kl": "KL",
    "max_kl": "max KL",
    "late_kl": "late KL",
    "nll_delta": "NLL delta",
    "first_divergence": "parts at step",
}
_SPEED = (
    "engine",
    "path",
    "prefill tokens/s",
    "decode tokens/s",
    "x standard",
    "reachable",
    "rows",
    "held",
    "allocated",
    "bytes by kind",
)


def bench_sections(rows: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> list[Section]:
    """`rows` as `eval.engine_report` makes them; `body` is the report around them."""
    what = f"{body['prompts']} prompts, {body['steps']} steps behind each, tokens of {body['forced_by']}"
    names = [name.format(k=body["top_k"]) for name in _DISTANCE.values()]
    return [
        Section(f"promises; {what}", ("engine", "promise", "labels", "kept", "what was looked at"), _promises(rows)),
        Section("beside standard", ("engine", *names), [(r["engine"], *(r[key] for key in _DISTANCE)) for r in rows]),
        Section(
            "speed, and memory behind the last prompt",
            _SPEED,
            [_held(row) for row in rows],
        ),
    ]


def _promises(rows: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    return [
        (
            row["engine"],
            row["contract"],
            labels(**{key: row[key] for key in ("quadratic", "experimental", "bench_only")}) or "-",
            "-" if row["kept"] is None else ("BROKEN", "kept")[row["kept"]],
            row["why"] if row["served"] else row["first_problem"],
        )
        for row in rows
    ]


def _held(row: Mapping[str, Any]) -> tuple[Any, ...]:
    speed = tuple(row[key] for key in ("engine", "path", "prefill_tokens_s", "decode_tokens_s", "step_times"))
    memory = row["memory"]
    if memory is None:
        return (*speed, *[None] * 5)
    sizes = (memory[key] for key in ("reachable_tokens", "rows", "occupied_bytes", "allocated_bytes"))
    return (*speed, *sizes, ", ".join(f"{kind['kind']} {kind['occupied']}" for kind in memory["kinds"]))
