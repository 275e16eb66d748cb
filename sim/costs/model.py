"""A cost model: rates for each term, where they come from, and how well they held. Reads and writes JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

from kvtape.backends.modelled.work import Work, WorkKind
from kvtape.sim.costs.terms import TERMS, counts
from kvtape.sim.errors import CostsError

__all__ = ["COSTS_SCHEMA", "CostTable", "Fit", "KindCosts", "Origin", "read_costs", "whole_ns"]

_Made = TypeVar("_Made", "Fit", "Origin")

COSTS_SCHEMA: Final = "kvtape.costs/2"

# What may stand in for an operation that the log does not show, nearest kin first: the same work, or the same bytes.
_STAND_INS: Final[dict[WorkKind, tuple[WorkKind, ...]]] = {
    "refill": ("prefill",),
    "rebuild": ("prefill",),
    "truncate": ("evict",),
    "evict": ("truncate",),
    "export": ("snapshot",),
    "admit": ("restore",),
    "snapshot": ("export",),
    "restore": ("admit",),
    "score": ("prefill",),
}
# Relative error of half the events behind a price from which on a report has to say so.
_VAGUE: Final = 0.25
_BESIDE: Final[frozenset[WorkKind]] = frozenset({"plan", "session"})
"""What is no engine's work: without a rate it is left out, and the model's `missing` says so."""


@dataclass(frozen=True, slots=True)
class Fit:
    """How a kind's rates held on what they were learnt from. `r2` of the times; errors relative, of each event.

    `residuals_ns`: the 5, 25, 50, 75 and 95 % quantiles of recorded - modelled. `tokens`, `resident`: the least and
    most that were seen. `scatter`: up to 200 (modelled, recorded) pairs in ns, evenly taken, for a plot.
    """

    events: int
    r2: float | None
    median_error: float
    p95_error: float
    residuals_ns: tuple[float, ...]
    tokens: tuple[int, int]
    resident: tuple[int, int]
    scatter: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class KindCosts:
    """`rates` in ns, one for each of `TERMS[kind]`."""

    rates: tuple[float, ...]
    fit: Fit | None = None


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose costs these are. `hypothetical`: from numbers of hardware, no log.

    `row_bytes`: KV bytes of a token; `logs`: logical digests of what was learnt from.
    """

    backend: str
    engine_version: str | None = None
    model_fingerprint: str | None = None
    model_name: str | None = None
    threads: int | None = None
    kv_type_k: str | None = None
    kv_type_v: str | None = None
    machine: str | None = None
    row_bytes: int = 0
    logs: tuple[str, ...] = ()
    kvtape_version: str | None = None
    hypothetical: bool = False


@dataclass(frozen=True, slots=True)
class CostTable:
    """A `CostModel`: each kind of work is a sum of terms."""

    origin: Origin
    kinds: Mapping[WorkKind, KindCosts]
    _known: dict[WorkKind, tuple[float, ...]] = field(default_factory=dict, compare=False, repr=False)

    def cost_ns(self, work: Work) -> int:
        """Raises CostsError for a kind that neither the log nor a stand-in shows, and as `whole_ns`."""
        rates = self._known.get(work.kind)
        if rates is None:
            rates = self._known[work.kind] = self._rates(work.kind)
        return whole_ns(work.kind, (r * c for r, c in zip(rates, counts(work), strict=True)))

    def rates(self, kind: WorkKind) -> dict[str, float]:
        """ns by name of the terms of `kind`, a stand-in's where it has none. Raises CostsError as `cost_ns`."""
        return dict(zip((term.name for term in TERMS[kind]), self._rates(kind), strict=True))

    def stand_in(self, kind: WorkKind) -> WorkKind | None:
        """Whose rates price `kind`: itself, a stand-in, or None."""
        return next((k for k in (kind, *_STAND_INS.get(kind, ())) if k in self.kinds), None)

    @property
    def stand_ins(self) -> dict[str, str]:
        """Kinds that are priced with another's rates."""
        found = {kind: self.stand_in(kind) for kind in TERMS}
        return {kind: by for kind, by in found.items() if by is not None and by != kind}

    @property
    def missing(self) -> list[str]:
        """Kinds without a price; asking for one is an error, but for `plan` and `session`, which then take no time."""
        return [kind for kind in TERMS if self.stand_in(kind) is None]

    def assumptions(self, kinds: Collection[WorkKind]) -> list[str]:
        """What a report that rests on the prices of `kinds` must say of them."""
        asked = [kind for kind in TERMS if kind in kinds]
        said = [f"{kind} costs what {self.stand_ins[kind]} costs" for kind in asked if kind in self.stand_ins]
        for kind in asked:
            fit = self.kinds[kind].fit if kind in self.kinds else None
            if fit is not None and fit.median_error > _VAGUE:
                off = f"half of the {fit.events} calibrated were off by {fit.median_error:.0%} or more"
                said.append(f"the price of {kind} is rough: {off}")
        if self.origin.hypothetical:
            said.append("hypothetical costs: from numbers of hardware, no log")
        return said

    def _rates(self, kind: WorkKind) -> tuple[float, ...]:
        by = self.stand_in(kind)
        if by is None:
            if kind in _BESIDE:
                return (0.0,) * len(TERMS[kind])
            raise CostsError(
                f"the costs say nothing of {kind} on {self.origin.backend}; calibrate on a log in which it happens"
            )
        there = {t.name: r for t, r in zip(TERMS[by], self.kinds[by].rates, strict=True)}
        return tuple(there.get(term.name, 0.0) for term in TERMS[kind])

    def to_json(self) -> dict[str, Any]:
        """Plain values; `read_costs` takes them back."""
        return {
            "schema": COSTS_SCHEMA,
            "origin": asdict(self.origin) | {"logs": list(self.origin.logs)},
            "kinds": {kind: _kind_json(kind, costs) for kind, costs in self.kinds.items()},
            "stand_ins": self.stand_ins,
            "missing": self.missing,
        }


def _kind_json(kind: WorkKind, costs: KindCosts) -> dict[str, Any]:
    terms = [{"name": t.name, "unit": t.unit, "rate": r} for t, r in zip(TERMS[kind], costs.rates, strict=True)]
    return {"terms": terms, "fit": None if costs.fit is None else asdict(costs.fit)}


def whole_ns(kind: WorkKind, parts: Iterable[float]) -> int:
    """Their sum. Raises CostsError for one beyond all floats."""
    try:
        return round(math.fsum(parts))
    except (OverflowError, ValueError):
        raise CostsError(f"the costs of {kind} are beyond all numbers; calibrate again") from None


def read_costs(path: Path) -> CostTable:
    """The costs in a file that `kvtape calibrate` wrote. Raises CostsError that names the file and what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CostsError(f"{path}: no such file; make it with: kvtape calibrate LOG --out {path}") from None
    except (ValueError, RecursionError):  # no UTF-8, no JSON, numbers of thousands of digits
        raise CostsError(f"{path}: not JSON; kvtape calibrate writes cost files") from None
    if not isinstance(value, dict) or value.get("schema") != COSTS_SCHEMA:
        found = value.get("schema") if isinstance(value, dict) else None
        raise CostsError(f"{path}: schema {found!r}, this version reads {COSTS_SCHEMA}; calibrate again")
    try:
        origin = _read(Origin, value["origin"])
        kinds = {kind: _read_kind(kind, said) for kind, said in value["kinds"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise CostsError(f"{path}: damaged ({type(err).__name__}: {err}); calibrate again") from None
    return CostTable(origin, kinds)


def _read_kind(kind: str, said: dict[str, Any]) -> KindCosts:
    terms = TERMS[kind]  # type: ignore[index]
    rates = {t["name"]: t["rate"] for t in said["terms"]}
    if set(rates) != {t.name for t in terms}:
        raise ValueError(f"{kind} has terms {', '.join(sorted(rates))}")
    if not all(_fits(r, float) and math.isfinite(r) and r >= 0 for r in rates.values()):
        raise ValueError(f"a rate of {kind} is no number, negative or not finite")
    fit = None if said.get("fit") is None else _read(Fit, said["fit"])
    return KindCosts(tuple(float(rates[t.name]) for t in terms), fit)


def _read(made: type[_Made], said: Mapping[str, Any]) -> _Made:
    """Raises TypeError for a field that is missing, unknown or of another type, naming it."""
    found = made(**{name: _tuples(value) for name, value in said.items()})
    for name, hint in get_type_hints(made).items():
        if not _fits(getattr(found, name), hint):
            raise TypeError(f"{name} is {getattr(found, name)!r}")
    return found


def _fits(value: Any, hint: Any) -> bool:
    within = get_args(hint)
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_fits(v, within[0]) for v in value)
    if within:
        return any(_fits(value, one) for one in within)
    return type(value) is hint or (hint is float and type(value) is int)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(v) for v in value) if isinstance(value, list) else value
