"""`kvtape repair`: what is whole of a torn or unsealed log, in a new file, and exactly what was cut."""

from __future__ import annotations

from kvtape.cli.args import AsJson, LogPath, NewLog

__all__ = ["repair"]


def repair(
    log: LogPath,
    out: NewLog,
    as_json: AsJson = False,
) -> int:
    """Seal what is whole of a log that a killed recorder or a full disk left.

    The log itself is not touched. Exits 1 when acknowledged events are lost, 4 when the log is damaged otherwise than
    at its end.

    \b
    Example:
      kvtape repair torn.duckdb --out whole.duckdb
    """
    from kvtape.cli.output import Section, emit, note
    from kvtape.cli.progress import progress
    from kvtape.traces.repair import repair as run

    with progress("repairing") as shown:
        report = run(log, out, shown.update)
    cut = report.cut
    body = {
        "out": str(out),
        "cut": {
            "anything": bool(cut),
            "batches": None if cut.batches is None else list(cut.batches),
            "events": cut.events,
            "sessions": {name: list(seqs) for name, seqs in cut.sessions.items()},
            "wal_bytes": cut.wal_bytes,
        },
        "kept": {"batches": report.batches, "rows": report.rows, "events": report.events},
        "unacknowledged": report.unacknowledged,
        "notes": list(report.notes),
        "leftovers": [p.name for p in report.leftovers],
    }
    for text in report.notes:
        note(f"kvtape: {text}")
    if report.leftovers:
        names = ", ".join(p.name for p in report.leftovers)
        note(f"kvtape: left by a process that died, no part of the log, may be removed: {names}")
    rows = [
        ("cut", cut.text),
        ("kept", f"{report.events} events in {report.batches} batches"),
        ("of them past the head", f"{report.unacknowledged} events: written, but nobody was told so"),
    ]
    emit(
        "repair",
        body,
        [Section(f"{out}: sealed", ("what", "value"), rows)],
        as_json=as_json,
        digest=report.digest,
        digest_kind="chain",
    )
    return 1 if cut.batches is not None else 0
