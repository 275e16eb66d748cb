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
_SPEED = {
    "path": "path",
    "prefill_tokens_s": "prefill tokens/s",
    "decode_tokens_s": "decode tokens/s",
    "step_times": "step, times standard",
}
_MEMORY = {
    "reachable_tokens": "reachable",
    "rows": "rows",
    "occupied_bytes": "bytes held",
    "allocated_bytes": "allocated",
}


def bench_sections(rows: Sequence[Mapping[str, Any]], body: Mapping[str, Any]) -> list[Section]:
    """`rows` as `eval.engine_report` makes them; `body` is the report around them."""
    what = f"{body['prompts']} prompts, {body['steps']} steps behind each, tokens of {body['forced_by']}"
    names = [name.format(k=body["top_k"]) for name in _DISTANCE.values()]
    return [
        Section(f"promises; {what}", ("engine", "promise", "labels", "kept", "what was looked at"), _promises(rows)),
        Section("beside standard", ("engine", *names), [(r["engine"], *(r[key] for key in _DISTANCE)) for r in rows]),
        Section("speed", ("engine", *_SPEED.values()), [(r["engine"], *(r[key] for key in _SPEED)) for r in rows]),
        Section(
            "memory behind the last prompt",
            ("engine", *_MEMORY.values(), "by kind"),
            [_held(r["engine"], r["memory"]) for r in rows if r["memory"] is not None],
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


def _held(engine: str, memory: Mapping[str, Any]) -> tuple[Any, ...]:
    kinds = ", ".join(f"{kind['kind']} {kind['occupied']}" for kind in memory["kinds"])
    return (engine, *(memory[key] for key in _MEMORY), kinds)
