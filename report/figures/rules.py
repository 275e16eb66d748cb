"""Panel of rules: what the log is, what its figures rest on, and the command lines that do it again."""

from __future__ import annotations

import shlex
from typing import Final

from kvtape.report.data.commands import repeated
from kvtape.report.data.rules import LogFacts, log_facts, run_facts, versions
from kvtape.report.data.settings import policy_facts, settings_facts
from kvtape.report.figures.parts import turned
from kvtape.report.given.reading import KINDS
from kvtape.report.panel import Cell, Missing, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["rules_panel"]

_LEAD: Final = (
    "What the log is, whether it is still what was written (every row was checked against its hash chain for this "
    "page), under which settings its sessions ran, and how to do all of it again. The chain digest covers every byte; "
    "two recordings of one run share the logical digest."
)
_SETTINGS_COLUMNS: Final = (
    *("run", "sessions", "engine", "version", "model", "fingerprint", "policy", "context asked (tokens)"),
    *("context (tokens)", "chunk (tokens)", "key/value types", "flash attention", "threads", "cold store (tokens)"),
    *("cold store (bytes)", "can", "content stored"),
)
_RUN_COLUMNS: Final = (
    *("run", "kind", "seed", "logical digest", "config digest", "kvtape", "engines", "made by", "configuration"),
)
_MOST_SETTINGS: Final = 50


def rules_panel(sources: Sources) -> Panel:
    """Raises LogUnreadable."""
    facts = log_facts(sources.log)
    commands = repeated(
        sources.log.path.name,
        sources.sessions,
        [named.name for named in sources.given.results],
        _named(sources),
        sources.only,
    )
    tables = [
        _log(facts),
        _findings(facts),
        _runs(sources),
        _policies(sources),
        _settings(sources),
        _results(sources),
        Table("Versions that read the log and wrote this page", ("package", "version"), versions()),
        Table(
            "How to do it again, where the log lies",
            ("what", "command"),
            [(what, said.replace("\n", " && ")) for what, said in commands.items()],
        ),
    ]
    repair = f"kvtape repair {shlex.quote(facts.name)} --out NEW"
    missing = () if facts.sealed else (Missing("The log is not sealed.", repair),)
    return Panel("rules", "Rules, digests, versions", _LEAD, (), tuple(t for t in tables if t is not None), missing)


def _named(sources: Sources) -> list[str]:
    """The runs that have to be named to get this page: none where the last one is shown, and results of all."""
    as_it_comes = sources.shown == (sources.log.default_run(),) and len(sources.runs) == len(sources.log.runs())
    return [] if as_it_comes else [run.run_id for run in sources.shown]


def _log(facts: LogFacts) -> Table:
    past = "unknown: no head beside it" if facts.unacknowledged is None else f"{facts.unacknowledged:,}"
    rows: list[tuple[Cell, ...]] = [
        ("log", facts.name),
        ("state", facts.state),
        ("chain digest", facts.chain_digest),
        ("rows", f"{facts.rows:,} in {facts.batches:,} batches"),
        ("events past the acknowledged head", past),
        ("schema version", str(facts.schema_version)),
        ("written by kvtape", facts.kvtape_version),
        *(("remark", text) for text in facts.remarks),
    ]
    return Table("The log", ("what", "value"), rows)


def _findings(facts: LogFacts) -> Table | None:
    return Table("What does not hold", ("kind", "finding"), facts.findings) if facts.findings else None


def _runs(sources: Sources) -> Table:
    rows: list[tuple[Cell, ...]] = [
        (
            *(f.run_id, f.kind, f.seed, f.logical_digest, f.config_digest, f.kvtape_version, f.engines),
            *(f.command or "the log does not tell", f.config),
        )
        for f in run_facts(sources.runs, sources.recorded, sources.digests)
    ]
    return turned(Table("Runs", _RUN_COLUMNS, rows))


def _policies(sources: Sources) -> Table | None:
    rows = [(p.spec, p.keeps, p.options) for p in policy_facts(sources.sessions)]
    title = "Policies, with every option; the last resident token is never evicted"
    return Table(title, ("policy", "keeps", "options"), rows) if rows else None


def _settings(sources: Sources) -> Table | None:
    found = settings_facts(sources.sessions)
    rows: list[tuple[Cell, ...]] = [
        (
            *(
                f.run_id,
                f.sessions,
                f.backend,
                f.engine_version,
                f.model,
                f.fingerprint,
                f.policy,
                f.n_ctx_asked,
                f.n_ctx,
            ),
            *(f.chunk, f.kv_types, f.flash_attention, f.threads, f.cold_tokens, f.cold_bytes, f.can, f.content),
        )
        for f in found[:_MOST_SETTINGS]
    ]
    title = "Settings of the sessions shown; sessions with the same settings are one row"
    return turned(Table(title, _SETTINGS_COLUMNS, rows, len(found) - len(rows))) if rows else None


def _results(sources: Sources) -> Table | None:
    rows = [(named.name, KINDS[type(named.value)]) for named in sources.given.results]
    rows += [("left out", text) for text in sources.given.left_out]
    return Table("Results that were given", ("file", "what it is"), rows) if rows else None
