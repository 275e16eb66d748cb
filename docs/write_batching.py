"""Write the generated parts of docs/continuous-batching.md from what the benchmark measured (`make docs`)."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import page_parts

PAGE = Path(__file__).parent / "continuous-batching.md"
MEASURED = Path(__file__).parent / "continuous-batching.json"
MEASURE = "python benchmarks/bench_batching.py --full --out docs/continuous-batching.json"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    # -0.0 is what rounding leaves of a tiny negative number.
    return f"{value:.2g}" if 0 < abs(value) < 0.0005 else f"{value + 0.0:.3f}"


def _interval(row: dict[str, Any], name: str) -> str:
    if row[name] is None:
        return "-"
    return f"{row[name]:+.3f} ({row[f'{name}_low']:+.3f} to {row[f'{name}_high']:+.3f})"


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _works(said: bool | str) -> str:
    return said if isinstance(said, str) else str(said).lower()


def versus(run: dict[str, Any]) -> str:
    """One table for each comparator, and how far both dense sides are apart."""
    parts = []
    for label, agreed in run["agreement"].items():
        rows = [row for row in run["rows"] if row["comparator"] == label]
        cells = [
            (
                f"`{row['policy']}`" if row["kind"] != "dense" else "dense",
                _number(row["nll"]),
                _interval(row, "over_dense"),
                _interval(row, "over_native"),
                f"{row['rows']:.1f}",
                "yes" if row["rows_equal"] else "no",
                row["kept"],
            )
            for row in rows
        ]
        columns = ("what keeps rows", "nll", "over dense", "over native", "rows", "equal rows", "which tokens")
        about = (
            f"{rows[0]['n_prompts']} prompts of {run['config']['tokens']} tokens, {rows[0]['n']} tokens compared; "
            f"keeping everything, both sides are at most {_number(agreed['max_difference'])} nats apart on any of them:"
        )
        parts.append(f"{about}\n\n{page_parts.table(columns, cells)}")
    return "\n\n".join(parts)


def measured(run: dict[str, Any]) -> str:
    """Of which version, machine and day."""
    said = run["comparator"]
    return f"{said['version']}, `{said['machine']}`, {run['day']}."


def curve(run: dict[str, Any]) -> str:
    """Every prompt of every comparator: blocks by step."""
    cells = [
        (
            f"`{row['comparator']}`",
            row["prompt"],
            _span(row["step"], row["last_step"]),
            _span(row["tokens"], row["last_tokens"]),
            row["blocks"],
            _span(row["rows_least"], row["rows_most"]),
        )
        for row in run["curve"]
    ]
    return page_parts.table(("comparator", "prompt", "steps", "tokens so far", "blocks", "rows of a layer"), cells)


def options(run: dict[str, Any]) -> str:
    """The verdicts, then every row."""
    verdicts = page_parts.table(
        ("option", "works"), [(f"`{name}`", _works(said)) for name, said in run["options"].items()]
    )
    cells = [
        (
            f"`{row['option']}`",
            row["setting"],
            _works(row["works"]),
            _number(row["max_difference"]),
            _number(row["excess"]),
            *({True: "yes", False: "no", None: "-"}[row[key]] for key in ("ids_equal", "repeatable")),
            f"{'furthest' if row['exact'] else 'over dense'} <= {row['limit']:g}",
            row["why"] or "",
        )
        for row in run["rows"]
    ]
    columns = ("option", "setting", "works", "furthest", "over dense", "same tokens", "repeatable", "limit", "why not")
    return f"{verdicts}\n\n{page_parts.table(columns, cells)}"


PARTS = {
    "measured": ("native", measured),
    "versus": ("native", versus),
    "greedy": ("greedy", versus),
    "folder": ("folder", versus),
    "curve": ("native", curve),
    "options": ("options", options),
}
"""By the marker around each in the page: the run that it is of, and how it is written."""


def filled(text: str) -> str:
    """The page with its generated parts as they would be now."""
    runs = json.loads(MEASURED.read_text(encoding="utf-8"))
    return page_parts.filled(text, {name: partial(_part, runs, *of) for name, of in PARTS.items()})


def _part(runs: dict[str, Any], run: str, part: Callable[[dict[str, Any]], str]) -> str:
    return part(runs[run]) if run in runs else f"Not measured yet: `{MEASURE} --only {run}`."


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
