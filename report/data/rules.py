"""What a log is and what its figures rest on: digests, versions, seeds, settings, whether it is what was written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from kvtape.planner.policy_options import OPTIONS
from kvtape.planner.rows import RunRow, SessionRow
from kvtape.planner.specs import SpecError, parse_policy, parse_spec
from kvtape.report.data.commands import config_of, made_by
from kvtape.traces.reader import Log
from kvtape.traces.verify import verify

__all__ = [
    "LogFacts",
    "PolicyFacts",
    "RunFacts",
    "SettingsFacts",
    "log_facts",
    "policy_facts",
    "run_facts",
    "settings_facts",
    "versions",
]

_KEEPS: Final[Mapping[str, str]] = {
    "none": "everything; a prompt that does not fit is refused",
    "stream": "the first `sink` and the last `recent` tokens, and what is pinned",
    "class": "up to `budget` tokens; the more evictable class goes first, then the older block",
    "h2o": "the blocks that all queries so far attended to most",
    "snapkv": "the blocks that the last `window` tokens, or a probe, attend to most",
    "tova": "the blocks that the last token attends to most",
    "opt": "the blocks that all later tokens will attend to most: clairvoyant, in a simulation only",
    "random": "blocks by a seeded draw",
}
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


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """A policy spec, what it keeps, and all its options with those that were left at their defaults."""

    spec: str
    keeps: str
    options: str


@dataclass(frozen=True, slots=True)
class SettingsFacts:
    """Settings that `sessions` sessions of a run share. Sizes in tokens, `cold_bytes` in bytes; None: not told."""

    run_id: str
    backend: str
    engine_version: str | None
    model: str | None
    fingerprint: str | None
    policy: str | None
    n_ctx_asked: int | None
    n_ctx: int | None
    chunk: int | None
    kv_types: str | None
    flash_attention: bool | None
    threads: int | None
    cold_tokens: int | None
    cold_bytes: int | None
    can: str | None
    content: bool
    sessions: int


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
    runs: Iterable[RunRow], sessions: Sequence[SessionRow], digests: Mapping[str, str]
) -> tuple[RunFacts, ...]:
    """`digests`: the logical digest of each run."""
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
            command=made_by(run, [s for s in sessions if s.run_id == run.run_id]),
        )
        for run in runs
    )


def policy_facts(sessions: Iterable[SessionRow]) -> tuple[PolicyFacts, ...]:
    """One for each policy of the sessions, in their order. A function of somebody's own is named, never loaded."""
    return tuple(_policy(spec) for spec in dict.fromkeys(s.policy for s in sessions) if spec is not None)


def settings_facts(sessions: Iterable[SessionRow]) -> tuple[SettingsFacts, ...]:
    """One for each way in which sessions were opened, in the order of the first of each."""
    counts: dict[SettingsFacts, int] = {}
    for session in sessions:
        settings = _settings(session)
        counts[settings] = counts.get(settings, 0) + 1
    return tuple(replace(settings, sessions=n) for settings, n in counts.items())


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
    return ", ".join(f"{name} {of}" for name, of in sorted(said.items())) if isinstance(said, dict) else text


def _policy(spec: str) -> PolicyFacts:
    try:
        named = parse_spec(spec)
        if named.target is not None:
            return PolicyFacts(spec, "what a function of the user's own says", "as in the spec; kvtape did not load it")
        policy = parse_policy(spec)
    except SpecError as err:
        return PolicyFacts(spec, "unknown", f"this kvtape does not know it: {err}")
    options = ", ".join(f"{name}={_option(getattr(policy, name))}" for name in OPTIONS[policy.name])
    return PolicyFacts(spec, _KEEPS[policy.name], options or "none")


def _option(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _settings(s: SessionRow) -> SettingsFacts:
    return SettingsFacts(
        run_id=s.run_id,
        backend=s.backend,
        engine_version=s.engine_version,
        model=s.model_name,
        fingerprint=s.model_fingerprint,
        policy=s.policy,
        n_ctx_asked=s.n_ctx_asked,
        n_ctx=s.n_ctx,
        chunk=s.chunk,
        kv_types=None if s.kv_type_k is None else f"{s.kv_type_k}/{s.kv_type_v}",
        flash_attention=s.flash_attention,
        threads=s.threads,
        cold_tokens=s.cold_budget_tokens,
        cold_bytes=s.cold_budget_bytes,
        can=_can(s.capabilities),
        content=s.content,
        sessions=0,
    )


def _can(capabilities: str | None) -> str | None:
    """The capabilities that the sessions had, by name; a window's size beside it."""
    if capabilities is None:
        return None
    try:
        said = json.loads(capabilities)
    except ValueError:
        return None
    if not isinstance(said, dict):
        return None
    able = [name if value is True else f"{name}={value}" for name, value in sorted(said.items()) if value]
    return ", ".join(name.replace("_", " ") for name in able) or "none of them"
