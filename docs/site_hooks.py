"""What mkdocs does beside rendering: pages of files outside docs/, and fences without the words behind them."""

from __future__ import annotations

import posixpath
import re
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^(\s*```[\w.+-]+) [^`\n]*$", re.MULTILINE)
OUTPUT = re.compile(r"^```(?:console|text)\n.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)")
LANGUAGES = {".py": "python", ".jsonl": "json", ".json": "json", ".toml": "toml"}


def source_of(target: str, page: str) -> str | None:
    """The file of the repository that `target` on a page names, where the site has no page or picture of it."""
    name = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    inside = name.startswith("docs/") and not name.endswith(".py")
    return None if inside or not (ROOT / name).exists() else name


def page_of(name: str) -> str:
    """Where the site has a file of the repository."""
    return f"source/{name.removesuffix('.md')}.md"


def source_page(name: str) -> str:
    """What the site shows of a file of the repository; of a folder, its files one after another."""
    path = ROOT / name
    if path.suffix == ".md":
        up = posixpath.relpath(".", posixpath.dirname(page_of(name)))
        return path.read_text(encoding="utf-8").replace("](docs/", f"]({up}/")
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file())
    parts = [f"# {name}\n"]
    for file in files:
        text = file.read_text(encoding="utf-8").rstrip().replace("```", "'''")
        heading = f"## {file.name}\n\n" if path.is_dir() else ""
        parts.append(f"{heading}```{LANGUAGES.get(file.suffix, 'text')}\n{text}\n```\n")
    return "\n".join(parts)


def aligned(code: str) -> str:
    """Lines of cells between tabs, as outputs are off a terminal, as columns; neighbours with tabs are one table."""
    done: list[str] = []
    for has_tabs, lines in groupby(code.split("\n"), key=lambda line: "\t" in line):
        rows = [line.split("\t") for line in lines]
        if has_tabs:
            widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
            done += ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=False)).rstrip() for row in rows]
        else:
            done += [row[0] for row in rows]
    return "\n".join(done)


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for every file outside the site that a page links to."""
    named: set[str] = set()
    for file in files.documentation_pages():
        named |= {n for t in LINK.findall(file.content_string) if (n := source_of(t, file.src_uri))}
    for name in sorted(named):
        page = File.generated(config, page_of(name), content=source_page(name), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(page)
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fences keep their language alone, outputs stand in columns; links out of the site lead to pages of `on_files`."""
    where = page.file.src_uri

    def inside(found: re.Match[str]) -> str:
        name = source_of(found.group(1), where)
        return posixpath.relpath(page_of(name), posixpath.dirname(where) or ".") if name else found.group(1)

    return LINK.sub(inside, OUTPUT.sub(lambda found: aligned(found.group()), FENCE.sub(r"\1", markdown)))
