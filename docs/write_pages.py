"""Write the generated parts of the pages: commands, modules, capabilities (`make docs`)."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from kvtape.cli.reference import reference

DOCS = Path(__file__).parent
ROOMS = ("planner", "capacity", "traces", "backends", "sim", "replay", "eval", "serve", "cli", "report", "testing")
BEGIN, END = "<!-- modules -->", "<!-- end of modules -->"
CAPABILITIES = "<!-- capabilities -->", "<!-- end of capabilities -->"


def packages(root: Path) -> list[str]:
    """The rooms and the packages inside them that have modules, each as a path from `root`."""
    found = [p.parent for room in ROOMS for p in sorted((root / room).rglob("__init__.py"))]
    return [p.relative_to(root).as_posix() for p in found if any(m.stem[:2] != "__" for m in p.glob("*.py"))]


def module_list(root: Path) -> str:
    """A table for each package: module and the first paragraph of its docstring."""
    parts = []
    for room in packages(root):
        parts.append(f"### {room}\n\n| module | what it is |\n|---|---|")
        for path in sorted((root / room).glob("*.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            if path.name not in ("__init__.py", "__main__.py") and text:
                first = " ".join(text.split("\n\n")[0].split()).replace("|", "\\|")
                parts.append(f"| `{path.stem}` | {first} |")
        parts.append("")
    return "\n".join(parts)


def capability_table() -> str:
    """What the tests assert of every engine and configuration."""
    sys.path.insert(0, str(DOCS.parent / "tests"))
    from support.capability_table import table

    return table()


def fill(page: Path, begin: str, end: str, text: str) -> None:
    """Put `text` between the marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    """Rewrite docs/cli.md, the module list of docs/architecture.md and the table of docs/backends.md."""
    (DOCS / "cli.md").write_text(reference(), encoding="utf-8")
    fill(DOCS / "architecture.md", BEGIN, END, module_list(DOCS.parent))
    fill(DOCS / "backends.md", *CAPABILITIES, f"{capability_table()}\n")


if __name__ == "__main__":
    main()
