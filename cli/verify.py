"""`kvtape verify`: is this log what was written?"""

from __future__ import annotations

from kvtape.cli.args import AsJson, LogPath

__all__ = ["verify"]


def verify(log: LogPath, as_json: AsJson = False) -> int:
    """Check that a log is what was written.

    The hash chain is computed again and compared with the log and its head file. Exits 1 when an edited, missing,
    repeated or reordered row or a lost tail is found, 4 when the file cannot be read.
    """
    from dataclasses import asdict

    from kvtape.cli.output import Section, emit, note
    from kvtape.cli.progress import progress
    from kvtape.traces.verify import verify as check

    with progress("verifying") as shown:
        result = check(log, shown.update)
    if result.notice:
        note(f"kvtape: {result.notice}")
    findings = [asdict(finding) for finding in result.findings]
    body = {"ok": result.ok, "findings": findings, "rows": result.rows, "batches": result.batches}
    summary = f"{log}: {'sound' if result.ok else 'NOT what was written'}"
    sections = [Section(f"{summary}, {result.rows} rows in {result.batches} batches", (), ())]
    if findings:
        columns = tuple(findings[0])
        sections.append(Section("findings", columns, [tuple(f.values()) for f in findings]))
    emit("verify", body, sections, as_json=as_json, digest=result.chain_digest, digest_kind="chain")
    return 0 if result.ok else 1
