"""From recorded times to a cost model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np

from kvtape.backends.modelled.work import WorkKind
from kvtape.planner.events import Event
from kvtape.planner.rows import RunRow, SessionRow
from kvtape.sim.costs.fitting import Floats, fit
from kvtape.sim.costs.model import CostTable, Fit, KindCosts, Origin
from kvtape.sim.costs.samples import Sample, samples_of
from kvtape.sim.costs.terms import TERMS, counts
from kvtape.sim.errors import CostsError

__all__ = ["RecordedTimes", "calibrate", "calibrate_samples"]

# Kinds whose times are recorded together and so can only be told apart together: blocks leave within an evict.
_TOGETHER: Final[tuple[tuple[WorkKind, ...], ...]] = (
    ("prefill",),
    ("decode",),
    ("evict", "export", "rebuild"),
    ("truncate",),
    ("shift",),
    ("admit",),
    ("refill",),
    ("score",),
    ("snapshot",),
    ("restore",),
    ("plan",),
    ("session",),
)
_SCATTER: Final = 200


class RecordedTimes(Protocol):
    """What calibration reads of a log; `traces.reader.Log` has it."""

    def default_run(self) -> RunRow: ...

    def sessions(self, run_id: str) -> Sequence[SessionRow]: ...

    def events(self, run_id: str, session_id: str) -> Sequence[Event]: ...

    def logical_digest(self, run_id: str) -> str: ...


@dataclass(slots=True)
class _Gathered:
    origins: dict[tuple[object, ...], Origin] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)
    row_bytes: list[int] = field(default_factory=list)


def calibrate(
    logs: Iterable[RecordedTimes],
    *,
    machine: str | None,
    kvtape_version: str,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> CostTable:
    """Costs of the one engine, model and configuration that the default runs of `logs` have in common.

    `progress` is told the sessions that were read, of those of the log. Raises CostsError where logs have
    several, or no event with a time.
    """
    found = _Gathered()
    for log in logs:
        run = log.default_run()
        if run.kind == "simulation":
            raise CostsError(f"run {run.run_id} is a simulation; calibrate on what a machine recorded")
        found.digests.append(log.logical_digest(run.run_id))
        sessions = log.sessions(run.run_id)
        for done, row in enumerate(sessions, 1):
            events = log.events(run.run_id, row.session_id)
            mine = list(samples_of(events))
            if mine:
                found.samples += mine
                found.origins.setdefault(_whose(row), _origin(row))
                found.row_bytes += [e.kv_bytes // e.resident_tokens for e in events if e.kv_bytes and e.resident_tokens]
            progress(done, len(sessions), "sessions")
    if not found.samples:
        raise CostsError("no event of an engine with a time in the log; record one, or use --roofline")
    if len(found.origins) > 1:
        named = "; ".join(f"{o.backend} {o.model_name} threads={o.threads}" for o in found.origins.values())
        raise CostsError(f"the logs are of different engines, models or settings ({named}); calibrate each by itself")
    (origin,) = found.origins.values()
    row_bytes = int(np.median(found.row_bytes)) if found.row_bytes else 0
    whole = Origin(
        backend=origin.backend,
        engine_version=origin.engine_version,
        model_fingerprint=origin.model_fingerprint,
        model_name=origin.model_name,
        threads=origin.threads,
        kv_type_k=origin.kv_type_k,
        kv_type_v=origin.kv_type_v,
        machine=machine,
        row_bytes=row_bytes,
        logs=tuple(found.digests),
        kvtape_version=kvtape_version,
    )
    return CostTable(whole, calibrate_samples(found.samples))


def calibrate_samples(samples: Sequence[Sample]) -> dict[WorkKind, KindCosts]:
    """Rates of every kind that occurs in `samples`."""
    kinds: dict[WorkKind, KindCosts] = {}
    for group in _TOGETHER:
        mine = [s for s in samples if s.works[-1].kind in group]
        if mine:
            kinds |= _fit_group(group, mine)
    return {kind: kinds[kind] for kind in TERMS if kind in kinds}


def _fit_group(group: tuple[WorkKind, ...], samples: Sequence[Sample]) -> Mapping[WorkKind, KindCosts]:
    first = {kind: sum(len(TERMS[k]) for k in group[:i]) for i, kind in enumerate(group)}
    x = np.zeros((len(samples), sum(len(TERMS[k]) for k in group)))
    for i, sample in enumerate(samples):
        for work in sample.works:
            at = first[work.kind]
            x[i, at : at + len(TERMS[work.kind])] += counts(work)
    y = np.array([s.elapsed_ns for s in samples], np.float64)
    # Where the log has one size only, what grows with the size explains it: a call of another size costs another time.
    sized = [term.sized for kind in group for term in TERMS[kind]]
    order = np.argsort([not yes for yes in sized], kind="stable")
    rates = np.empty(len(sized))
    rates[order] = _median(y) if group == ("session",) else fit(x[:, order], y)
    predicted: Floats = x @ rates
    out: dict[WorkKind, KindCosts] = {}
    for kind in group:
        having = [i for i, s in enumerate(samples) if any(w.kind == kind for w in s.works)]
        if having:
            mine = tuple(float(r) for r in rates[first[kind] : first[kind] + len(TERMS[kind])])
            works = [w for i in having for w in samples[i].works if w.kind == kind]
            tokens, resident = [w.tokens for w in works], [w.resident for w in works]
            seen = (min(tokens), max(tokens)), (min(resident), max(resident))
            out[kind] = KindCosts(mine, _judged(y[having], predicted[having], *seen))
    return out


def _median(y: Floats) -> Floats:
    """One rate for one term: what passes between two events has a long tail that is nobody's cost."""
    return np.array([float(np.median(y))])


def _judged(y: Floats, predicted: Floats, tokens: tuple[int, int], resident: tuple[int, int]) -> Fit:
    rest: Floats = y - predicted
    spread = float(((y - y.mean()) ** 2).sum())
    relative = np.abs(rest) / np.maximum(y, 1.0)
    every = max(1, -(-len(y) // _SCATTER))
    return Fit(
        events=len(y),
        r2=1.0 - float((rest**2).sum()) / spread if spread > 0 else None,
        median_error=float(np.median(relative)),
        p95_error=float(np.quantile(relative, 0.95)),
        residuals_ns=tuple(float(q) for q in np.quantile(rest, (0.05, 0.25, 0.5, 0.75, 0.95))),
        tokens=tokens,
        resident=resident,
        scatter=tuple((float(p), float(t)) for p, t in zip(predicted[::every], y[::every], strict=True)),
    )


def _whose(row: SessionRow) -> tuple[object, ...]:
    return (row.backend, row.model_fingerprint, row.threads, row.kv_type_k, row.kv_type_v, row.flash_attention)


def _origin(row: SessionRow) -> Origin:
    return Origin(
        backend=row.backend,
        engine_version=row.engine_version,
        model_fingerprint=row.model_fingerprint,
        model_name=row.model_name,
        threads=row.threads,
        kv_type_k=row.kv_type_k,
        kv_type_v=row.kv_type_v,
    )
