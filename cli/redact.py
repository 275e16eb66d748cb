"""`kvtape redact`: a copy of a log without content, which still verifies."""

from __future__ import annotations

from kvtape.cli.args import AsJson, LogPath, NewLog

__all__ = ["redact"]


def redact(
    log: LogPath,
    out: NewLog,
    as_json: AsJson = False,
) -> int:
    """Write a log without token ids and texts, to be given away.

    Keyed hashes stay: they show which prompts begin alike, and nothing else without kvtape.key, which you keep. The
    new log has the chain of the old one, and verifies.

    \b
    Example:
      kvtape redact private.duckdb --out shared.duckdb
    """
    from kvtape.cli.output import Section, emit
    from kvtape.cli.progress import progress
    from kvtape.traces.redact import redact as run

    with progress("redacting") as shown:
        report = run(log, out, shown.update)
    body = {"out": str(out), "events": report.events, "taken": report.taken}
    sections = [Section(f"{out}: {report.events} events", ("taken out of", "rows"), list(report.taken.items()))]
    emit("redact", body, sections, as_json=as_json, digest=report.digest, digest_kind="chain")
    return 0
