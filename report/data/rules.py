"""What a log is and what its figures rest on: digests, versions, seeds, and whether it is what was written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from kvtape.planner.rows import RunRow, SessionRow
from kvtape.report.data.commands import config_of, made_by
from kvtape.traces.reader import Log
from kvtape.traces.verify import verify

__all__ = ["LogFacts", "RunFacts", "log_facts", "run_facts", "versions"]

_PACKAGES: Final = ("kvtape", "duckdb", "numpy", "pyarrow", "llama-cpp-python", "openvino", "openvino-genai")
_UNSEALED: Final = "not sealed: being recorded, or its recorder died"


@dataclass(frozen=True, slots=True)
class LogFacts:
    """`sound`: whether its hash chain, head, fold and definitions hold; `findings`: kind and words of what does not.

    `unacknowledged`: events past the acknowledged head; None without a head. `remarks`: repaired, merged, redacted,
    and what the reader had to say.
    """

    name: str
    schema_version: int
    kvtape_version: str
    sealed: bool
    sound: bool
    findings: tuple[tuple[str, str], ...]
    rows: int
    batches: int
    chain_digest: str
    unacknowledged: int | None
    remarks: tuple[str, ...]

    @property
    def state(self) -> str:
        """In words."""
        sealed = "sealed" if self.sealed else _UNSEALED
        found = "it is what was written" if self.sound else f"NOT what was written, {len(self.findings)} findings"
        return f"{sealed}; {found}"


@dataclass(frozen=True, slots=True)
class RunFacts:
    """`engines`: versions by name, and `seed`, in words. `command`: what made it; None: the log does not tell."""

    run_id: str
    kind: str
    logical_digest: str
    config_digest: str
    config: str
    seed: str
    kvtape_version: str
    engines: str
    command: str | None


def log_facts(log: Log) -> LogFacts:
    """With the chain computed again over every row. Raises LogUnreadable."""
    found = verify(log.path)
    meta = log.meta
    told = [f"{key}: {meta[key]}" for key in ("repaired", "redacted", "merged_from") if key in meta]
    notices = [text for text in (found.notice or log.notice, log.head_problem) if text]
    return LogFacts(
        name=log.path.name,
        schema_version=log.schema_version,
        kvtape_version=meta.get("kvtape_version", "unknown"),
        sealed=log.sealed,
        sound=found.ok,
        findings=tuple((str(f.kind), f.detail) for f in found.findings),
        rows=found.rows,
        batches=found.batches,
        chain_digest=found.chain_digest,
        unacknowledged=log.unacknowledged,
        remarks=tuple(dict.fromkeys(told + notices)),
    )


def run_facts(
    runs: Iterable[RunRow], sessions: Mapping[str, Sequence[SessionRow]], digests: Mapping[str, str]
) -> tuple[RunFacts, ...]:
    """`sessions`, `digests`: the sessions and the logical digest of each run."""
    return tuple(
        RunFacts(
            run_id=run.run_id,
            kind=run.kind,
            logical_digest=digests[run.run_id],
            config_digest=run.config_digest,
            config=run.config,
            seed=_seed(run),
            kvtape_version=run.kvtape_version,
            engines=_engines(run.engine_versions),
            command=made_by(run, sessions[run.run_id]),
        )
        for run in runs
    )


def versions() -> tuple[tuple[str, str], ...]:
    """Of Python and of the packages here, that read the log and wrote the report; those not installed are left out."""
    found = [("python", ".".join(map(str, sys.version_info[:3])))]
    for package in _PACKAGES:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return tuple(found)


def _seed(run: RunRow) -> str:
    """As the run's row or its configuration says. Without either nothing was drawn."""
    config = config_of(run)
    said = [("seed", run.seed if run.seed is not None else config.get("seed")), ("seeds", config.get("seeds"))]
    return ", ".join(f"{name} {value}" for name, value in said if value is not None) or "nothing is drawn"


def _engines(text: str) -> str:
    try:
        said = json.loads(text)
    except ValueError:
        return text
    if not isinstance(said, dict):
        return text
    return ", ".join(f"{name} {of}" for name, of in sorted(said.items())) or "none"
