"""Panels to one self-contained HTML page: no network, no clock, the same bytes for the same panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvtape.report.markup import json_block, table_html, text
from kvtape.report.panel import Figure, Missing, Panel, Table

__all__ = ["PageMeta", "page"]

_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = (
    "base.js",
    "frame.js",
    "raster.js",
    "sessions.js",
    "residency.js",
    "timeline.js",
    "occupancy.js",
    "chart.js",
    "start.js",
)


@dataclass(frozen=True, slots=True)
class PageMeta:
    """What stands above the panels. `title`: of the page and its tab; `lead`: a sentence under it.

    `facts`: name and value, in order. `packed`: long columns for figures of sessions, by the id of their block
    (`packing.pack`): base64 texts. `sessions`: what those figures share besides (`figures.sessions`).
    """

    title: str
    lead: str
    facts: tuple[tuple[str, str], ...] = ()
    packed: Mapping[str, str] = field(default_factory=dict)
    sessions: Mapping[str, Any] = field(default_factory=dict)


def page(panels: Sequence[Panel], meta: PageMeta) -> str:
    """The page. Raises ValueError where two panels or figures have one id."""
    ids = [p.id for p in panels] + [f.id for p in panels for f in p.figures] + list(meta.packed)
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise ValueError(f"used more than once as an id: {', '.join(twice)}")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{text(meta.title)}</title>",
            # Without it browsers ask for a favicon.
            '<link rel="icon" href="data:,">',
            f"<style>\n{_asset('report.css')}</style>\n</head>\n<body>",
            '<a class="skip" href="#panels">Skip to the panels</a>',
            _header(meta),
            _nav(panels),
            '<main id="panels" tabindex="-1">',
            _NOSCRIPT,
            *(_panel(panel) for panel in panels),
            "</main>",
            '<footer><p class="note">Written by kvtape. Nothing on this page is loaded from anywhere.</p></footer>',
            json_block("sessions", meta.sessions),
            *(_packed(name, data) for name, data in sorted(meta.packed.items())),
            f"<script>\n{_script()}</script>",
            "</body>\n</html>\n",
        ]
    )


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""Nothing can be loaded, whatever a text of the log is taken for."""


_NOSCRIPT = '<noscript><p class="missing">Figures are drawn by a script; the tables have their numbers.</p></noscript>'


def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script() -> str:
    """In a function of its own: no name of it is seen from outside."""
    return "(() => {\n" + "".join(_asset(name) for name in _SCRIPTS) + "})();\n"


def _packed(name: str, data: str) -> str:
    return f'<script type="text/plain" id="{text(name)}">{text(data)}</script>'


def _header(meta: PageMeta) -> str:
    facts = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in meta.facts)
    toggle = '<button type="button" id="theme">Theme: as the system</button>'
    return (
        f'<header><h1>{text(meta.title)}</h1><p class="lead">{text(meta.lead)}</p>'
        f'<div class="controls">{toggle}</div><dl class="facts">{facts}</dl></header>'
    )


def _nav(panels: Sequence[Panel]) -> str:
    items = "".join(f'<li><a href="#{text(p.id)}">{text(p.title)}</a></li>' for p in panels)
    return f'<nav aria-label="Panels"><ul>{items}</ul></nav>'


def _panel(panel: Panel) -> str:
    name = text(panel.id)
    return "\n".join(
        [
            f'<section id="{name}" aria-labelledby="{name}-title">',
            f'<h2 id="{name}-title">{text(panel.title)}</h2><p class="lead">{text(panel.lead)}</p>',
            *(_missing(m) for m in panel.missing),
            *(_figure(f) for f in panel.figures),
            *(table_html(t) for t in panel.tables),
            "</section>",
        ]
    )


def _missing(missing: Missing) -> str:
    return f'<div class="missing"><p>{text(missing.what)}</p><code>{text(missing.command)}</code></div>'


def _figure(figure: Figure) -> str:
    """The drawing's place is an image to assistive technology, named by its title and told by its summary."""
    name = text(figure.id)
    table = "" if figure.table is None else _folded(figure.table)
    return (
        f'<figure id="{name}" data-kind="{figure.kind}" aria-labelledby="{name}-caption"><figcaption>'
        f'<h3 id="{name}-caption">{text(figure.title)}</h3>'
        f'<span class="summary" id="{name}-summary">{text(figure.summary)}</span></figcaption>'
        f'<div class="stage"></div>{json_block(f"{figure.id}-data", figure.data)}'
        f"{table}</figure>"
    )


def _folded(table: Table) -> str:
    return f"<details><summary>Data of this figure</summary>{table_html(table)}</details>"
