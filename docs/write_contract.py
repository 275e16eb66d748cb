"""Write the generated parts of docs/contract.md from the tables that the tests run (`make docs`)."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "tests"))

import page_parts  # noqa: E402
from kvtape.backends.errors import FatalClass  # noqa: E402
from kvtape.replay.identities import IDENTITIES  # noqa: E402
from support.fault_plays import PLAYS  # noqa: E402
from support.fault_refusals import REFUSALS  # noqa: E402
from support.fault_table import CELLS, ENGINE_NAMES, OPERATIONS  # noqa: E402


def fault_matrix() -> str:
    """One table a class: an operation a row, an engine a column; then what is refused."""
    counts = {how: sum(cell.how == how for cell in CELLS.values()) for how in ("provoked", "injected", "cannot happen")}
    parts = [f"{len(CELLS)} cells: " + ", ".join(f"{n} {how}" for how, n in counts.items()) + "."]
    for fatal in FatalClass:
        parts += [
            f"\n### {fatal}\n",
            f"| operation | {' | '.join(ENGINE_NAMES)} |",
            "|---" * (1 + len(ENGINE_NAMES)) + "|",
        ]
        for operation in OPERATIONS:
            cells = (CELLS[fatal, engine, operation] for engine in ENGINE_NAMES)
            told = (f"**{c.how}**: {c.what}" if c.provoke else f"{c.how}: {c.what}" for c in cells)
            parts.append(f"| `{operation}` | {' | '.join(told)} |")
    parts += ["\n### Refused, and nothing changed\n", "| what goes wrong | where | error |", "|---|---|---|"]
    parts += [f"| {r.what} | every engine | `{r.error.__name__}` |" for r in REFUSALS]
    parts += [
        "| a context that cannot be allocated | llama, at open | `EnvironmentProblem` |",
        "| a device that is not there | openvino, at open | `EnvironmentProblem` |",
    ]
    names = ", ".join(f"`{operation}`" for operation in PLAYS)
    parts += [f"\nA host (`--isolate`) that is killed is **device_lost**, provoked on both engines in: {names}."]
    return "\n".join(parts)


def identities() -> str:
    """What is held against the rows of a log."""
    rows = [f"| `{i.name}` | {i.says} |" for i in IDENTITIES]
    return "\n".join(["| identity | what must hold |", "|---|---|", *rows])


PARTS = {"fault matrix": fault_matrix, "identities": identities}
"""By the marker around each in the page."""


def main() -> None:
    page = DOCS / "contract.md"
    page.write_text(page_parts.filled(page.read_text(encoding="utf-8"), PARTS), encoding="utf-8")


if __name__ == "__main__":
    main()
