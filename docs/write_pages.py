"""Write the generated parts of the pages: commands, modules, capabilities (`make docs`)."""

from __future__ import annotations

import ast
from pathlib import Path

from kvtape.cli.reference import reference

DOCS = Path(__file__).parent
ROOMS = ("planner", "capacity", "traces", "backends", "sim", "replay", "eval", "cli", "report", "testing")
BEGIN, END = "<!-- modules -->", "<!-- end of modules -->"


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


def main() -> None:
    """Rewrite docs/cli.md, the module list of docs/architecture.md and the table of docs/backends.md."""
    (DOCS / "cli.md").write_text(reference(), encoding="utf-8")
    page = DOCS / "architecture.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(f"{before}{BEGIN}\n\n{module_list(DOCS.parent)}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
