"""What a command prints: JSON for scripts (one line in a pipe), tables for people, tab-separated lines for pipes.

Results go to stdout, everything else to stderr. Colours and boxes appear only on a terminal, and never with
NO_COLOR set.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Literal

__all__ = [
    "DigestKind",
    "Section",
    "canonical_json",
    "colour_system",
    "emit",
    "enveloped",
    "kvtape_version",
    "note",
    "report_digest",
]

DigestKind = Literal["logical", "chain", "report"]
"""`logical`: what happened in the run; `chain`: every byte of the log; `report`: this output itself."""


@dataclass(frozen=True, slots=True)
class Section:
    """A titled table of the human output; without columns, each row is a line of text."""

    title: str | None
    columns: tuple[str, ...]
    rows: Sequence[Sequence[Any]]


def kvtape_version() -> str:
    return version("kvtape")


def canonical_json(value: Any) -> str:
    """Sorted keys, no spaces, integers exact whatever their size."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def report_digest(body: Mapping[str, Any]) -> str:
    """SHA-256 hex over the canonical JSON of `body`."""
    return hashlib.sha256(canonical_json(body).encode()).hexdigest()


def emit(
    verb: str,
    body: Mapping[str, Any],
    sections: Sequence[Section],
    *,
    as_json: bool,
    digest: str | None = None,
    digest_kind: DigestKind = "report",
) -> None:
    """Print a command's result. Without `digest` it is the digest of `body`."""
    value = report_digest(body) if digest is None else digest
    terminal = sys.stdout.isatty()
    if as_json:
        print(
            json.dumps(
                enveloped(verb, body, value, digest_kind),
                sort_keys=True,
                indent=1 if terminal else None,
                ensure_ascii=False,
                allow_nan=False,
            )
        )
        return
    for number, section in enumerate(sections):
        if number and terminal:
            print()
        (_rich if terminal and section.columns else _plain)(section)
    # In a pipe the result is for a program, which would take this line for data.
    print(f"{digest_kind} digest {value}", file=sys.stdout if terminal else sys.stderr)


def enveloped(
    verb: str, body: Mapping[str, Any], digest: str | None = None, digest_kind: DigestKind = "report"
) -> dict[str, Any]:
    """A command's result with its schema, version and digest. Without `digest` it is that of `body`."""
    return {
        **body,
        "schema": f"kvtape.{verb}/1",
        "kvtape_version": kvtape_version(),
        "digest": report_digest(body) if digest is None else digest,
        "digest_kind": digest_kind,
    }


def note(text: str) -> None:
    """A remark for people, on stderr, so that it never mixes with a result."""
    print(text, file=sys.stderr, flush=True)


def colour_system() -> Literal["auto"] | None:
    """What Rich's consoles take: without one there is no bold and no italics either, which NO_COLOR alone leaves."""
    return None if os.environ.get("NO_COLOR") else "auto"


def _plain(section: Section) -> None:
    if section.title:
        print(f"# {section.title}" if section.columns else section.title)
    if section.columns:
        print("\t".join(section.columns))
    for row in section.rows:
        print("\t".join(_cell(value) for value in row))


def _rich(section: Section) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    numeric = [
        all(row[i] is None or isinstance(row[i], int | float) for row in section.rows)
        for i in range(len(section.columns))
    ]
    table = Table(title=section.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name, right in zip(section.columns, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    for row in section.rows:
        table.add_row(*(_cell(value) for value in row))
    Console(highlight=False, markup=False, color_system=colour_system()).print(table)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    return str(value).replace("\t", " ").replace("\n", "\\n")
