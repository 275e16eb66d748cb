"""What the writers of pages share: tables, and parts of a page between markers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["filled", "table"]


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]], shown: Callable[[Any], str] = str) -> str:
    """In Markdown, each value as `shown` writes it."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(shown(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def filled(text: str, parts: Mapping[str, Callable[[], str]]) -> str:
    """The page with its generated parts, by the marker around each, as they would be now."""
    for name, part in parts.items():
        before, _, rest = text.partition(f"<!-- {name} -->")
        _, _, after = rest.partition(f"<!-- end of {name} -->")
        text = f"{before}<!-- {name} -->\n\n{part()}\n\n<!-- end of {name} -->{after}"
    return text
