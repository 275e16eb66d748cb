"""Under which policies and settings sessions ran: every option spelt out, sessions alike as one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from kvtape.planner.policy_options import OPTIONS
from kvtape.planner.rows import SessionRow
from kvtape.planner.specs import SpecError, parse_policy, parse_spec

__all__ = ["PolicyFacts", "SettingsFacts", "policy_facts", "settings_facts"]

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
