"""The tables of `kvtape eval --task batching`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtape.cli.output import Section

__all__ = ["curve_table", "option_table", "versus_table"]


def versus_table(rows: Sequence[dict[str, Any]]) -> Section:
    figures = ("nll", "over_dense", "over_dense_low", "over_dense_high", "over_native", "over_native_low")
    keys = ("policy", "budget_blocks", *figures, "over_native_high", "rows", "rows_equal", "kept", "kept_by_layer")
    columns = (
        "what keeps rows",
        "blocks",
        "nll",
        "over dense",
        "low",
        "high",
        "over native",
        "low",
        "high",
        "rows",
        "equal rows",
        "which tokens",
        "by layer",
    )
    # `none` is the policy of our dense sessions; the table says what keeps rows.
    named = [row | {"policy": "dense"} if row["kind"] == "dense" else row for row in rows]
    cells = [tuple(_three(row[key]) for key in keys) for row in named]
    return Section("the same tokens, equally many rows; intervals over prompts, Student, 95 %", columns, cells)


def curve_table(rows: Sequence[dict[str, Any]]) -> Section:
    columns = ("comparator", "prompt", "steps", "tokens", "blocks", "rows")
    cells = [
        (
            row["comparator"],
            row["prompt"],
            _span(row["step"], row["last_step"]),
            _span(row["tokens"], row["last_tokens"]),
            row["blocks"],
            _span(row["rows_least"], row["rows_most"]),
        )
        for row in rows
    ]
    return Section("the comparator's cache, step by step", columns, cells)


def option_table(rows: Sequence[dict[str, Any]]) -> Section:
    keys = ("option", "setting", "works", "max_difference", "excess", "ids_equal", "repeatable", "limit", "why")
    columns = ("option", "setting", "works", "furthest", "over dense", "same tokens", "repeatable", "limit", "why not")
    return Section(
        "does each option compute what it says? nats", columns, [tuple(_three(row[k]) for k in keys) for row in rows]
    )


def _three(value: Any) -> Any:
    return round(value, 3) if isinstance(value, float) else value


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"
