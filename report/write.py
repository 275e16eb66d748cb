"""From a log to a report in a file: what `kvtape report` and `kvtape demo` call."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtape.backends.user_files import write_whole
from kvtape.report.figures.sessions import packed_sessions, session_data
from kvtape.report.page import PageMeta, page
from kvtape.report.panels import make_panels
from kvtape.report.sources import Sources, choose
from kvtape.traces.reader import Log

__all__ = ["Written", "report_html", "write_report"]

_LEAD = "What a language model's KV cache held, event by event, what that cost, and what other policies would do."


@dataclass(frozen=True, slots=True)
class Written:
    """`size`: bytes of the page, `digest`: their SHA-256 (hex). `sessions`: how many are shown. `left_out`: files of
    folders, with the reason.
    """

    path: Path
    size: int
    digest: str
    sessions: int
    left_out: tuple[str, ...] = ()


def report_html(sources: Sources) -> str:
    """The whole page. The same log, runs and results give the same text."""
    meta = PageMeta(
        f"kvtape report: {sources.log.path.name}",
        _LEAD,
        _facts(sources),
        packed=packed_sessions(sources.views),
        sessions=session_data(sources.views),
    )
    return page(make_panels(sources), meta)


def write_report(
    log: Log, out: Path, *, runs: Sequence[str] = (), sessions: Sequence[str] = (), results: Sequence[Path] = ()
) -> Written:
    """Write the report of an open log to `out`, whole or not at all.

    Raises NoSuchRow for a run or session that is not there, or a log without runs; UsageError for a file of `results`
    that is none, or of another log; OSError, which names `out`.
    """
    sources = choose(log, runs, sessions, results)
    html = report_html(sources).encode()
    write_whole(out, html)
    return Written(out, len(html), hashlib.sha256(html).hexdigest(), len(sources.sessions), sources.given.left_out)


def _facts(sources: Sources) -> tuple[tuple[str, str], ...]:
    rows = sources.sessions
    return (
        ("log", sources.log.path.name),
        ("run", _named([f"{run.run_id} ({run.kind})" for run in sources.shown])),
        ("sessions", f"{len(rows):,}"),
        ("engine", _named([f"{row.backend} {row.engine_version or ''}".strip() for row in rows])),
        ("model", _named([row.model_name for row in rows])),
        ("policy", _named([row.policy for row in rows])),
    )


def _named(values: Sequence[str | None], most: int = 3) -> str:
    """The distinct ones in their order; of many the first ones, and how many more there are."""
    found = list(dict.fromkeys(value for value in values if value))
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return (", ".join(found[:most]) or "unknown") + more
