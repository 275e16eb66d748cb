"""What evaluations came to, in a log or in a result: recall of planted facts, likelihood of texts, by policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.eval.intervals import wilson
from kvtape.planner.rows import TrialRow
from kvtape.report.given.reading import Given
from kvtape.report.given.shapes import Evaluation, EvaluationRow
from kvtape.traces.reader import Log

__all__ = ["Quality", "given_qualities", "qualities", "qualities_of"]

_Key = tuple[str, str, str, str, int | None, str | None]


@dataclass(frozen=True, slots=True)
class Quality:
    """One policy at one budget in one task, over `n` trials of `n_tokens` tokens in all.

    `source`: the run, or the file of a result. `recall`: share of right answers, `low` and `high` the ends of its
    95 % interval (Wilson). `nll`, `kl`: nats a token, each trial weighted by its tokens. None where the task has no
    such figure, or a trial of it lacks one.
    """

    source: str
    task: str
    backend: str
    policy: str
    budget: int | None
    region: str | None
    n: int | None
    n_tokens: int | None
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


def given_qualities(given: Given) -> tuple[Quality, ...]:
    """Of results of `kvtape eval`: a text counts as a whole; policies that did not run are left out."""
    return tuple(
        _given(named.name, named.value.task, row)
        for named in given.of(Evaluation)
        for row in named.value.rows
        if row.absent is None and row.part in (None, "all")
    )


def _given(source: str, task: str, row: EvaluationRow) -> Quality:
    return Quality(
        source=source,
        task=task if row.comparator is None else f"{task}, beside {row.comparator}",
        backend=row.backend or row.kind or "unknown",
        policy=row.policy,
        budget=row.budget,
        region=row.region,
        n=row.n if row.recall is not None else row.n_prompts,
        n_tokens=None if row.recall is not None else row.n,
        recall=row.recall,
        low=row.recall_low,
        high=row.recall_high,
        nll=row.nll,
        kl=row.kl,
    )


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
