"""Policies compared by simulation: the points of what-ifs and searches, the front among them, and the bounds beside it.

Nothing is computed here but sums of figures that the simulation told: the front and the intervals are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kvtape.report.given.reading import Given, Named
from kvtape.report.given.shapes import SimulatedRow, Tune, Whatif

__all__ = ["MOST_POINTS", "Comparison", "Figure", "Point", "Refused", "comparisons"]

MOST_POINTS: Final = 400
"""Of a comparison with more, those on its front come first, then the others as they were given."""

_BOUND_TOLERANCE: Final = 1e-9
"""Retained mass is rounded to nine digits."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A median over the draws and the ends of their middle 95 %; without draws the value alone. None: not known."""

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """One policy on one machine. Budget in tokens, times in ns, `peak_kv` in bytes, masses as shares.

    `computed`: tokens prefilled and computed again; `least_computed` the fewest that any policy has to, and
    `most_retained` the most attention mass that any could keep at this budget (both clairvoyant). `front_share`: share
    of the draws in which the point is on the front. `clairvoyant`: nobody can run it, so it is on no front.
    """

    policy: str
    budget: int | None
    slots: int | None
    cold_tokens: int | None
    block: int | None
    clairvoyant: bool
    on_front: bool
    front_share: float | None
    turns: int | None
    not_served: int | None
    ttft_p95: Figure
    tpot_p95: Figure
    peak_kv: Figure
    retained: Figure
    computed: int | None
    least_computed: int | None
    most_retained: float | None
    forgotten: int | None
    evicted: int | None

    @property
    def serves_all(self) -> bool:
        return self.not_served == 0


@dataclass(frozen=True, slots=True)
class Refused:
    """A point that cannot be simulated, and why."""

    policy: str
    budget: int | None
    why: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """Points over one workload and one cost model. `source`: the file; `draws`: of the arrivals, 1 as recorded.

    `objectives`: what the front is over, and which way is better. `verdict`: what a search found, None of a what-if.
    `left_out`: points, and those that cannot be, beyond the first `MOST_POINTS` of each. `broken_bounds`: points beyond
    a bound, which cannot be: whoever made the file erred; of all points.
    """

    source: str
    about: str
    points: tuple[Point, ...]
    refused: tuple[Refused, ...]
    objectives: Mapping[str, str]
    draws: int
    seed: int | None
    rules: Mapping[str, str]
    assumed: tuple[str, ...]
    hypothetical: bool
    costs_digest: str
    verdict: str | None = None
    commands: tuple[str, ...] = ()
    left_out: tuple[int, int] = (0, 0)
    broken_bounds: tuple[str, ...] = ()


def comparisons(given: Given) -> tuple[Comparison, ...]:
    """One for each what-if and search that was given; the demo's what-if has a second one, of its small session."""
    found: list[Comparison] = []
    for named in given.of(Whatif):
        found.append(_whatif(named, named.value, "the whole log"))
        if named.value.notes is not None:
            found.append(_whatif(named, named.value.notes, "the session notes alone"))
    return (*found, *(_tune(named) for named in given.of(Tune)))


def _whatif(named: Named[Whatif], said: Whatif, about: str) -> Comparison:
    return _comparison(named.name, said, about, objectives=said.objectives)


def _tune(named: Named[Tune]) -> Comparison:
    said = named.value
    shown = said.best or said.nearest
    goal = f"least {said.minimize}" if said.minimize is not None else f"most {said.maximize}"
    wanted = " and ".join(said.where) or "no condition"
    found = "none" if shown is None else f"{shown.policy} at {shown.budget} tokens"
    verdict = (
        f"{goal} where {wanted}: {found}"
        if said.feasible
        else f"nothing that was tried meets {wanted}; nearest: {found}"
    )
    about = f"a search, {len(said.trials)} trials of {said.choices} choices, {said.method}"
    commands = tuple((said.commands or {}).values())
    return _comparison(named.name, said, about, objectives={}, verdict=verdict, commands=commands)


def _comparison(
    source: str,
    said: Whatif | Tune,
    about: str,
    *,
    objectives: Mapping[str, str],
    verdict: str | None = None,
    commands: tuple[str, ...] = (),
) -> Comparison:
    points, refused = _points(said.rows), _refused(said.rows)
    return Comparison(
        source=source,
        about=about,
        points=_first(points),
        refused=refused[:MOST_POINTS],
        objectives=objectives,
        draws=said.seeds,
        seed=said.seed,
        rules=said.rules,
        assumed=said.assumed,
        hypothetical=said.hypothetical,
        costs_digest=said.costs_digest,
        verdict=verdict,
        commands=commands,
        left_out=_left_out(points, refused),
        broken_bounds=_broken(points),
    )


def _points(rows: Sequence[SimulatedRow]) -> tuple[Point, ...]:
    return tuple(_point(row) for row in rows if row.error is None)


def _refused(rows: Sequence[SimulatedRow]) -> tuple[Refused, ...]:
    return tuple(Refused(row.policy, row.budget, row.error) for row in rows if row.error is not None)


def _first(points: Sequence[Point]) -> tuple[Point, ...]:
    if len(points) <= MOST_POINTS:
        return tuple(points)
    return tuple([p for p in points if p.on_front] + [p for p in points if not p.on_front])[:MOST_POINTS]


def _left_out(*several: Sequence[object]) -> tuple[int, int]:
    points, refused = (max(0, len(some) - MOST_POINTS) for some in several)
    return points, refused


def _point(row: SimulatedRow) -> Point:
    paid = (row.prefilled_tokens, row.recomputed_tokens)
    return Point(
        policy=row.policy,
        budget=row.budget,
        slots=row.slots,
        cold_tokens=row.cold_tokens,
        block=row.block,
        clairvoyant=row.clairvoyant,
        on_front=row.pareto,
        front_share=row.pareto_share,
        turns=row.turns,
        not_served=row.not_served,
        ttft_p95=_figure(row, "ttft_p95_ns"),
        tpot_p95=_figure(row, "tpot_p95_ns"),
        peak_kv=_figure(row, "peak_kv_bytes"),
        retained=_figure(row, "retained_mass"),
        computed=None if paid[0] is None or paid[1] is None else paid[0] + paid[1],
        least_computed=row.opt_prefilled_tokens,
        most_retained=row.opt_retained_mass,
        forgotten=row.forgotten_tokens,
        evicted=row.evicted_tokens,
    )


def _figure(row: SimulatedRow, name: str) -> Figure:
    ends = (row.intervals or {}).get(name)
    return Figure(getattr(row, name)) if ends is None else Figure(getattr(row, name), ends.low, ends.high)


def _broken(points: Sequence[Point]) -> tuple[str, ...]:
    """Where a policy did better than the bound. Tokens only count where every turn was served."""
    said = []
    for p in points:
        if p.serves_all and p.computed is not None and p.least_computed is not None and p.computed < p.least_computed:
            said.append(f"{p.policy} computed {p.computed} tokens, fewer than the bound of {p.least_computed}")
        kept, most = p.retained.value, p.most_retained
        if kept is not None and most is not None and kept > most + _BOUND_TOLERANCE:
            said.append(f"{p.policy} retained {kept:.6f} of the attention, more than the bound of {most:.6f}")
    return tuple(said)
