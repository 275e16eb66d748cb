"""What evaluations kept in a log came to: recall of planted facts, likelihood of texts, by policy and budget."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.eval.intervals import wilson
from kvtape.planner.rows import TrialRow
from kvtape.traces.reader import Log

__all__ = ["Quality", "qualities", "qualities_of"]

_Key = tuple[str, str, str, str, int | None, str | None]


@dataclass(frozen=True, slots=True)
class Quality:
    """One policy at one budget in one task, over `n` trials of `n_tokens` tokens in all.

    `recall`: share of right answers, `low` and `high` its Wilson score interval, 95 %. `nll`, `kl`: nats a token, each
    trial weighted by its tokens. None where the task has no such figure, or a trial of it lacks one.
    """

    run_id: str
    task: str
    backend: str
    policy: str
    budget: int | None
    region: str | None
    n: int
    n_tokens: int
    recall: float | None
    low: float | None
    high: float | None
    nll: float | None
    kl: float | None


def qualities_of(log: Log, run_ids: Sequence[str]) -> tuple[Quality, ...]:
    """Those of each run. Raises LogUnreadable."""
    found: list[Quality] = []
    for run_id in run_ids:
        trials = log.trials(run_id)
        if trials:
            backends = {session.session_id: session.backend for session in log.sessions(run_id)}
            found += qualities(trials, backends)
    return tuple(found)


def qualities(trials: Sequence[TrialRow], backends: dict[str, str]) -> list[Quality]:
    """In the order of the first trial of each. `backends`: of sessions, by id; "unknown" where it is none of them."""
    groups: dict[_Key, list[TrialRow]] = {}
    for t in trials:
        backend = backends.get(t.session_id, "unknown")
        groups.setdefault((t.run_id, t.task, backend, t.policy, t.budget_tokens, t.region), []).append(t)
    return [_quality(key, group) for key, group in groups.items()]


def _quality(key: _Key, group: Sequence[TrialRow]) -> Quality:
    answers = [t.correct for t in group if t.correct is not None]
    told = len(answers) == len(group)
    low, high = wilson(sum(answers), len(group)) if told else (None, None)
    nll, kl = (_weighted([(getattr(t, name), t.n_tokens) for t in group]) for name in ("nll", "kl"))
    return Quality(
        *key,
        n=len(group),
        n_tokens=sum(t.n_tokens for t in group),
        recall=sum(answers) / len(group) if told else None,
        low=low,
        high=high,
        nll=nll,
        kl=kl,
    )


def _weighted(values: Sequence[tuple[float | None, int]]) -> float | None:
    known = [(value, n) for value, n in values if value is not None]
    total = sum(n for _, n in known)
    if len(known) < len(values) or not total:
        return None
    return math.fsum(value * n for value, n in known) / total
