"""The search for the cheapest point that meets every condition: all of them where they are few, else by Optuna.

Optuna's sampler (tree-structured Parzen estimator, Bergstra et al. 2011; with conditions, feasible trials go before the
others, and those by how little they miss) is asked for trials eight at a time, however many workers there are, and told
in their order: a seed gives the same search anywhere. Equal points are simulated once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol

from kvtape.sim.errors import NoAttention, SimulationError
from kvtape.sim.quality.meter import FIGURES as MASS_FIGURES
from kvtape.sim.whatif.conditions import ALL_SERVED, Condition, Goal, violation
from kvtape.sim.whatif.executors import Runner
from kvtape.sim.whatif.grid import Point
from kvtape.sim.whatif.rows import Draws, Progress, simulated
from kvtape.sim.whatif.space import MACHINE, Choice, Space
from kvtape.sim.world.script import Script

if TYPE_CHECKING:
    from optuna.trial import Trial

__all__ = ["Found", "Scored", "Wish", "search"]

_BATCH: Final = 8
_ASKS: Final = 4
"""How often the sampler is asked for each point that is wanted: it may come back to known ones."""
_IMPOSSIBLE: Final = 1e9
"""How much a point that cannot be misses its conditions by: more than any other."""
_UNSERVED: Final = 1e6
"""How much a turn that is not served counts, where all must be: a cache that does nothing is near to no wish."""


@dataclass(frozen=True, slots=True)
class Wish:
    goal: Goal
    conditions: tuple[Condition, ...]

    @property
    def figures(self) -> tuple[str, ...]:
        """What is asked for, by name."""
        return self.goal.name, *(c.name for c in self.conditions)


@dataclass(frozen=True, slots=True)
class Scored:
    """A point and its row. `cost`: less is better, None without a figure. `misses`: of each condition, 0: holds."""

    point: Point
    row: dict[str, Any]
    cost: float | None
    misses: tuple[float, ...]

    @property
    def feasible(self) -> bool:
        return self.cost is not None and not any(self.misses)

    @property
    def order(self) -> tuple[Any, ...]:
        """What is best comes first: by how little it misses, by the goal; of equals what is small and plain."""
        name, budget = str(self.point), self.point.budget or 0
        goal = (self.cost is None, self.cost or 0.0)
        return (sum(self.misses), *goal, self.row["peak_kv_bytes"] or 0, budget, len(name), name)


@dataclass(frozen=True, slots=True)
class Found:
    """`points` that differ, in the order in which they were first tried; `trials`: the place of each trial's point.

    `best`: None where no point is feasible; `nearest` then misses least, None where no point can be simulated.
    """

    points: tuple[Scored, ...]
    trials: tuple[int, ...]
    method: str
    assumed: tuple[str, ...]
    best: Scored | None
    nearest: Scored | None


class _Asker(Protocol):
    method: str

    def ask(self, n: int) -> list[Choice]:
        """At most n choices; none at the end."""

    def tell(self, scored: Sequence[Scored]) -> None:
        """What became of the choices that were asked for last."""


def search(
    run: Runner, space: Space, wish: Wish, *, trials: int, seed: int, draws: Draws, progress: Progress | None = None
) -> Found:
    """Simulate `trials` points of `space`, or all of them if there are no more choices.

    Raises ModuleNotFoundError without Optuna where it is needed, NoAttention for a figure of attention that the log
    has not, SimulationError where no point can be simulated or none has a figure that is asked for.
    """
    _check_attention(space.scripts, wish)
    asker: _Asker = _Everything(space) if space.size <= trials else _Optuna(space, seed)
    tried: dict[Point, Scored] = {}
    places: list[int] = []
    assumed: dict[str, None] = {}
    while choices := asker.ask(min(_BATCH, trials - _simulated(tried), _ASKS * trials - len(places))):
        points = [space.point(choice) for choice in choices]
        fresh = list(dict.fromkeys(p for p in points if p not in tried))
        found = simulated(run, fresh, draws)
        tried |= {p: _score(p, row, wish) for p, row in zip(fresh, found.rows, strict=True)}
        assumed |= dict.fromkeys(found.assumed)
        asker.tell([tried[p] for p in points])
        order = list(tried)
        places += [order.index(p) for p in points]
        if progress is not None:
            progress(_simulated(tried), min(trials, space.size))
    return _found(tuple(tried.values()), tuple(places), asker.method, tuple(assumed), wish)


def _check_attention(scripts: Sequence[Script], wish: Wish) -> None:
    """No simulation gives the attention of a log that has none: said before the first, not behind the last."""
    lacking = next((s for s in scripts if s.attention is None), None)
    for name in wish.figures:
        if name in MASS_FIGURES and lacking is not None:
            raise NoAttention(f"{name} cannot be asked for; attention is not known: {lacking.no_attention}")


def _simulated(tried: Mapping[Point, Scored]) -> int:
    return sum(scored.row["error"] is None for scored in tried.values())


def _score(point: Point, row: dict[str, Any], wish: Wish) -> Scored:
    if row["error"] is not None:
        return Scored(point, row, None, (_IMPOSSIBLE,) * len(wish.conditions))
    return Scored(point, row, wish.goal.cost(row), tuple(_miss(condition, row) for condition in wish.conditions))


def _miss(condition: Condition, row: dict[str, Any]) -> float:
    missed = violation(condition, row)
    if missed is None:
        return _IMPOSSIBLE
    return missed * _UNSERVED if condition == ALL_SERVED else missed


def _found(
    points: tuple[Scored, ...], places: tuple[int, ...], method: str, assumed: tuple[str, ...], wish: Wish
) -> Found:
    there = [p for p in points if p.row["error"] is None]
    if not there:
        raise SimulationError(f"no point can be simulated; the first says: {points[0].row['error']}")
    for name in wish.figures:
        if all(p.row[name] is None for p in there):
            raise SimulationError(
                f"no point has a figure {name}; one about attention mass needs a log of kvtape record --score-all"
            )
    first = min(there, key=lambda p: p.order)
    best = first if first.feasible else None
    return Found(points, places, method, assumed, best, None if best else first)


class _Everything:
    """Every choice there is."""

    method = "every point of the space"

    def __init__(self, space: Space) -> None:
        self._left: Iterator[Choice] = space.choices()

    def ask(self, n: int) -> list[Choice]:
        return list(islice(self._left, n))

    def tell(self, scored: Sequence[Scored]) -> None:
        pass


class _Optuna:
    def __init__(self, space: Space, seed: int) -> None:
        import optuna

        self._space = space
        self.method = f"Optuna {optuna.__version__}, TPE of seed {seed}, {_BATCH} trials at a time"
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed), direction="minimize")
        self._asked: list[Trial] = []

    def ask(self, n: int) -> list[Choice]:
        self._asked = [self._study.ask() for _ in range(n)]
        return [_choice(trial, self._space) for trial in self._asked]

    def tell(self, scored: Sequence[Scored]) -> None:
        for trial, one in zip(self._asked, scored, strict=True):
            misses = one.misses if one.cost is not None else (_IMPOSSIBLE,)
            for i, missed in enumerate(misses):
                trial.set_constraint(f"condition {i}", missed)
            self._study.tell(trial, 0.0 if one.cost is None else one.cost)


def _choice(trial: Trial, space: Space) -> Choice:
    """One place in each list; lists of the policies that were not chosen are not asked for."""
    names = [f"{i} {text}" for i, text in enumerate(space.policies)]
    policy = names.index(trial.suggest_categorical("policy", names))
    found = {"policy": policy}
    for name, values in space.dimensions(policy).items():
        shared = name if name in MACHINE else f"{names[policy]} {name}"
        found[name] = trial.suggest_int(shared, 0, len(values) - 1)
    return found
