"""The points of a what-if: policies times budgets times machines, from flags or a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Final

from kvtape.planner.grammar import choose_name
from kvtape.planner.specs import DEFAULT_SINK, POLICY_NAMES, PolicySpec, SpecError, parse_spec, policy_with
from kvtape.sim.errors import SimulationError
from kvtape.sim.world.settings import Settings

__all__ = ["AXES", "Grid", "Point", "points_of", "read_grid"]

AXES: Final = ("policy", "budget", "slots", "cold_tokens", "block")

_DRAWS: Final = ("seeds", "seed")
_LEAST: Final = {"policy": None, "budget": 2, "slots": 1, "cold_tokens": 0, "block": 1, "seeds": 1, "seed": 0}
"""The least that a grid file may say; None: text."""


@dataclass(frozen=True, slots=True)
class Point:
    """`policy` in its canonical form at `budget` tokens of KV for a session; None: the recorded context.

    `settings` has both. `error`: why there is no such point.
    """

    policy: str
    budget: int | None
    settings: Settings
    error: str | None = None

    def __str__(self) -> str:
        s = self.settings
        said = {"budget": self.budget, "slots": s.slots, "cold_tokens": s.cold_tokens, "block": s.block}
        return ", ".join([self.policy, *(f"{name} {value}" for name, value in said.items() if value is not None)])


def points_of(axes: Mapping[str, Sequence[Any]], base: Settings) -> list[Point]:
    """Every combination of `axes`, in their order, on the machine of `base`; equal ones once.

    A budget is the context of the modelled session. A policy that names none of its own gets it: `budget` of
    class, random and the like, and for `stream` without `recent` three quarters of it, sinks included. Raises
    SpecError for a policy that is wrong at any budget, SimulationError for what no machine can have.
    """
    policies = list(axes.get("policy") or ())
    if not policies:
        raise SimulationError("no policy to try; give --policy, repeatable, or a --grid file")
    found: dict[Point, None] = {}
    choices = [axes.get(name) or (None,) for name in AXES]
    for text, budget, slots, cold, block in product(*choices):
        settings = replace(
            base,
            n_ctx=budget if budget is not None else base.n_ctx,
            slots=slots if slots is not None else base.slots,
            cold_tokens=cold if cold is not None else base.cold_tokens,
            block=block if block is not None else base.block,
        )
        _check(text)
        try:
            policy = _at(text, budget)
        except SpecError as err:
            found.setdefault(Point(text, budget, settings, str(err)))
            continue
        found.setdefault(Point(policy.canonical, budget, replace(settings, policy=policy.canonical)))
    return list(found)


def _check(text: str) -> None:
    """Raises SpecError for a spec that no budget makes right."""
    _at(text, 2**30)


def _at(text: str, budget: int | None) -> PolicySpec:
    spec = parse_spec(text)
    given = dict(spec.args)
    own = spec.target is None
    if own:
        choose_name("policy", spec.name, POLICY_NAMES)
    if own and spec.name == "stream" and "recent" not in given and budget is not None:
        given.setdefault("sink", str(DEFAULT_SINK))
        sink = int(given["sink"]) if given["sink"].isdigit() else 0
        given["recent"] = str(max(1, budget * 3 // 4 - sink))
    elif not (own and spec.name in ("none", "stream")) and "budget" not in given and budget is not None:
        given["budget"] = str(budget)
    return policy_with(spec, given)


@dataclass(frozen=True, slots=True)
class Grid:
    """What a grid file says: `axes` by name, and how arrivals are drawn, where it says so."""

    axes: dict[str, list[Any]]
    seeds: int | None = None
    seed: int | None = None


def read_grid(path: Path) -> Grid:
    """A JSON file, `{"policy": [...], "budget": [...], ...}`. Raises SimulationError with what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once)
    except FileNotFoundError:
        raise SimulationError(f"{path}: no such file; a grid is JSON, {_shape()}") from None
    except _Twice as err:
        raise SimulationError(f"{path}: {err} is there twice; put its values in one list") from None
    except (OSError, ValueError, RecursionError):
        raise SimulationError(f"{path}: not JSON; a grid is {_shape()}") from None
    if not isinstance(value, dict):
        raise SimulationError(f"{path}: no object; a grid is {_shape()}")
    try:
        for name in value:
            choose_name("name in a grid", name, (*AXES, *_DRAWS))
    except SpecError as err:
        raise SimulationError(f"{path}: {err}") from None
    for name, least in _LEAST.items():
        if name in value:
            _check_values(path, name, value[name], least)
    return Grid({name: value[name] for name in AXES if name in value}, value.get("seeds"), value.get("seed"))


def _check_values(path: Path, name: str, given: Any, least: int | None) -> None:
    if name in _DRAWS:
        fits, what = _fits(given, least), f"one whole number of at least {least}"
    else:
        fits = isinstance(given, list) and bool(given) and all(_fits(entry, least) for entry in given)
        what = "a list of " + ("specs" if least is None else f"whole numbers of at least {least}")
    if not fits:
        raise SimulationError(f"{path}: {name} must be {what}")


class _Twice(Exception):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for i, (name, _) in enumerate(pairs):
        if name in [other for other, _ in pairs[:i]]:
            raise _Twice(name)
    return dict(pairs)


def _fits(value: Any, least: int | None) -> bool:
    """Whether it is a whole number that the axis takes; for specs, which have no least, whether it is text."""
    return isinstance(value, str) if least is None else type(value) is int and least <= value < 2**63


def _shape() -> str:
    return (
        '{"policy": ["stream"], "budget": [512], "slots": [2], "cold_tokens": [0], "block": [32], '
        '"seeds": 20, "seed": 0}; all but policy may be left out'
    )
