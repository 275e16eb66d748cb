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

__all__ = ["AXES", "Point", "points_of", "read_grid"]

AXES: Final = ("policy", "budget", "slots", "cold_tokens", "block")


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


def read_grid(path: Path) -> dict[str, list[Any]]:
    """The axes in a JSON file, `{"policy": [...], "budget": [...], ...}`. Raises SimulationError with what is wrong."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SimulationError(f"{path}: no such file; a grid is JSON, {_shape()}") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise SimulationError(f"{path}: not JSON; a grid is {_shape()}") from None
    if not isinstance(value, dict) or not set(value) <= set(AXES):
        unknown = sorted(set(value) - set(AXES)) if isinstance(value, dict) else []
        raise SimulationError(f"{path}: {', '.join(unknown) or 'this'} is not known; a grid is {_shape()}")
    for name, entries in value.items():
        specs = name == "policy"
        if not isinstance(entries, list) or not all(isinstance(e, str) if specs else _whole(e) for e in entries):
            raise SimulationError(f"{path}: {name} must be a list of {'specs' if specs else 'whole numbers'}")
    return value


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _shape() -> str:
    return '{"policy": ["stream"], "budget": [512], "slots": [2], "cold_tokens": [0], "block": [32]}'
