"""What a search may choose from: policies, each with options of its own, and the machine around them.

Every dimension is a list of values; a choice is a place in each list. What a spec says already is not searched, nor are
values for which the log's attention is too coarse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, Final

from kvtape.planner.grammar import INT_MAX, Spec, parse_spec
from kvtape.planner.specs import parse_policy
from kvtape.sim.errors import SimulationError
from kvtape.sim.quality.answerable import assumed_of_scores
from kvtape.sim.whatif.grid import Point, points_of
from kvtape.sim.world.script import Script
from kvtape.sim.world.settings import Settings

__all__ = ["MACHINE", "Choice", "Space", "budgets_between"]

Choice = Mapping[str, int]
"""A place in the list of every dimension that the chosen policy has; `policy` itself among them."""

MACHINE: Final = ("budget", "slots", "cold_tokens")

_QUARTERS: Final = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
_PLANNING: Final[dict[str, tuple[Any, ...]]] = {"every": (1, 32, 128), "block": (16, 32, 64, 128)}
_RANKED: Final[dict[str, tuple[Any, ...]]] = {"sink": (0, 4), **_PLANNING}

_OPTIONS: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "none": {},
    "stream": {"sink": (0, 1, 4, 16, 64), "recent": (*_QUARTERS, Fraction(7, 8)), **_PLANNING},
    "class": {"sink": (0, 4, 64), "recent": (1, *_QUARTERS), **_PLANNING},
    "h2o": {"recent": (Fraction(1, 8), *_QUARTERS), "norm": ("sum", "mean"), **_RANKED},
    "snapkv": {"window": (16, 32, 64), "pool": (1, 7), **_RANKED},
    "tova": {"grace": (0, 32), **_RANKED},
    "random": {"recent": (1, *_QUARTERS), **_RANKED},
}
"""Values that are tried of options that a spec leaves open; a fraction is of the budget, sinks included."""

_GRAIN: Final = ("window", "pool", "block")
"""Options on which it depends whether recorded attention has an answer."""

_MOST_BUDGETS: Final = 32
_ANY: Final = 2**30
"""A budget that is too small for no policy."""


def budgets_between(low: int, high: int) -> list[int]:
    """Both ends and up to 30 budgets between them, each larger by about the same factor, on whole blocks of 32."""
    if not 2 <= low <= high <= INT_MAX:
        raise SimulationError(f"budgets {low}:{high}: write LOW:HIGH with 2 <= LOW <= HIGH <= {INT_MAX}")
    ratio = (high / low) ** (1 / (_MOST_BUDGETS - 1))
    between = {round(low * ratio**i / 32) * 32 for i in range(1, _MOST_BUDGETS - 1)}
    return sorted({low, high, *(b for b in between if low < b < high)})


@dataclass(frozen=True)
class Space:
    """`policies` are specs. `machine`: values of the dimensions in MACHINE; one that is left out is as in `base`.

    `scripts`: the log that is asked.
    """

    policies: tuple[str, ...]
    machine: Mapping[str, Sequence[int]]
    base: Settings
    scripts: tuple[Script, ...] = ()

    def __post_init__(self) -> None:
        """Raises SpecError for a spec that no choice makes right, SimulationError for a policy that cannot be had."""
        if not self.policies:
            raise SimulationError("no policy to try; give --policy, repeatable")
        for i, text in enumerate(self.policies):
            if parse_spec(text).name == "opt":
                raise SimulationError(f"policy {text} knows the future; nothing can be tuned to run it")
            options = {name: values[0] for name, values in self.dimensions(i).items() if name not in MACHINE}
            self._point(text, options, _ANY)

    @property
    def size(self) -> int:
        """How many choices there are; several may come to the same point."""
        return sum(prod(map(len, self.dimensions(i).values())) for i in range(len(self.policies)))

    def dimensions(self, policy: int) -> dict[str, Sequence[Any]]:
        """The lists that the policy in that place is searched over, by their names."""
        return self._dimensions[policy]

    @cached_property
    def _dimensions(self) -> list[dict[str, Sequence[Any]]]:
        machine = {name: self.machine[name] for name in MACHINE if self.machine.get(name)}
        return [{**machine, **self._options(text)} for text in self.policies]

    def _options(self, text: str) -> Mapping[str, Sequence[Any]]:
        """What `text` leaves open, without what the log has no answer to; all of it, to say why, where it has none."""
        left = _left_open(text)
        answered = self._answered(text)
        if answered is None:
            return left
        return {
            name: [v for v in values if name not in answered or self._answers(text, answered | {name: v})]
            for name, values in left.items()
        }

    def answers(self, text: str) -> bool:
        """Whether the log has the attention that a policy asks for, under some options that `text` leaves open."""
        return self._answered(text) is not None

    def _answered(self, text: str) -> dict[str, Any] | None:
        """The first options that the log answers, of those on which that depends."""
        left = {name: values for name, values in _left_open(text).items() if name in _GRAIN}
        tried = (dict(zip(left, values, strict=True)) for values in product(*left.values()))
        return next((options for options in tried if self._answers(text, options)), None)

    def _answers(self, text: str, options: Mapping[str, Any]) -> bool:
        whole = {name: values[0] for name, values in _left_open(text).items()} | dict(options)
        policy = parse_policy(self._point(text, whole, _ANY).policy)
        try:
            for script in self.scripts:
                assumed_of_scores(policy, script.attention, script.no_attention)
        except SimulationError:
            return False
        return True

    def choices(self) -> Iterator[Choice]:
        """All of them, in a fixed order."""
        for policy in range(len(self.policies)):
            lists = self.dimensions(policy)
            for places in product(*(range(len(values)) for values in lists.values())):
                yield {"policy": policy, **dict(zip(lists, places, strict=True))}

    def point(self, choice: Choice) -> Point:
        """What is simulated; one with an `error` where the options do not go together."""
        lists = self.dimensions(choice["policy"])
        values = {name: listed[choice[name]] for name, listed in lists.items()}
        machine = {name: values.pop(name) for name in MACHINE if name in values}
        return self._point(self.policies[choice["policy"]], values, machine.pop("budget", None), **machine)

    def _point(self, text: str, options: Mapping[str, Any], budget: int | None, **machine: int) -> Point:
        spec = parse_spec(text)
        said = dict(spec.args).get("sink", "0")
        sink = int(options.get("sink", said if said.isdecimal() else 0))
        given = dict(spec.args) | {name: _text(value, budget, sink) for name, value in options.items()}
        if spec.target is None and spec.name == "random":
            given.setdefault("seed", "0")
        whole = str(Spec(spec.name, tuple(given.items()), spec.target))
        axes: dict[str, list[Any]] = {"policy": [whole], "budget": [budget] if budget is not None else []}
        return points_of(axes | {name: [value] for name, value in machine.items()}, self.base)[0]


def _left_open(text: str) -> dict[str, tuple[Any, ...]]:
    spec = parse_spec(text)
    searched = _OPTIONS.get(spec.name, {}) if spec.target is None else _PLANNING
    return {name: values for name, values in searched.items() if name not in dict(spec.args)}


def _text(value: Any, budget: int | None, sink: int) -> str:
    if not isinstance(value, Fraction):
        return str(value)
    if budget is None:
        raise SimulationError("options that are a share of the budget need one; give --budget")
    return str(max(1, int(value * budget) - sink))
