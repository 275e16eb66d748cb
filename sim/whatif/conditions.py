"""What a search wants: a figure to make least or most, and conditions on figures, with their units."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, Literal

from kvtape.capacity.errors import CapacityError
from kvtape.capacity.sizes import parse_size
from kvtape.planner.grammar import SpecError, choose_name
from kvtape.sim.errors import SimulationError
from kvtape.sim.whatif.pareto import Better
from kvtape.sim.whatif.rows import FIGURES

__all__ = ["ALL_SERVED", "Condition", "Goal", "parse_condition", "parse_goal", "violation"]

_WRITTEN: Final = re.compile(r"\s*(?P<name>\w+)\s*(?P<sign><=|>=)\s*(?P<bound>\S+(?: \S+)?)\s*")
_TIME: Final = re.compile(r"(?P<number>[0-9]{1,19}(?:\.[0-9]{1,19})?)\s*(?P<unit>ns|us|ms|s)")
_NUMBER: Final = re.compile(r"-?[0-9]{1,19}(?:\.[0-9]{1,19})?")
_UNIT_NS: Final = {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9}


@dataclass(frozen=True, slots=True)
class Condition:
    """`name` at most (`<=`) or at least (`>=`) `bound`, in the figure's own unit: ns, bytes, tokens, a share."""

    name: str
    sign: Literal["<=", ">="]
    bound: Fraction

    def __str__(self) -> str:
        bound = int(self.bound) if self.bound.denominator == 1 else float(self.bound)
        return f"{self.name}{self.sign}{bound}"


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    better: Better

    def cost(self, row: Mapping[str, Any]) -> float | None:
        """Less is better; None where the row has no such figure."""
        value = row[self.name]
        return None if value is None else float(value if self.better == "less" else -value)


ALL_SERVED: Final = Condition("not_served", "<=", Fraction(0))
"""What holds unless a condition says otherwise: times over fewer turns say nothing beside times over all."""


def parse_goal(text: str, better: Better) -> Goal:
    """Raises SimulationError for a figure that a row does not have."""
    return Goal(_figure(text.strip(), text), better)


def parse_condition(text: str) -> Condition:
    """`FIGURE<=BOUND` or `FIGURE>=BOUND`; times need a unit (ns, us, ms, s). Raises SimulationError."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise SimulationError(f"condition {text!r}: write FIGURE<=BOUND or FIGURE>=BOUND, such as ttft_p95<=500ms")
    name = _figure(found["name"], text)
    sign: Literal["<=", ">="] = "<=" if found["sign"] == "<=" else ">="
    return Condition(name, sign, _bound(name, found["bound"], text))


def violation(condition: Condition, row: Mapping[str, Any]) -> float | None:
    """By what share of its bound (of 1 for a bound of 0) a row misses a condition; 0: it holds; None: no figure."""
    value = row[condition.name]
    if value is None:
        return None
    excess = Fraction(value) - condition.bound
    if condition.sign == ">=":
        excess = -excess
    return float(max(Fraction(0), excess) / (abs(condition.bound) or 1))


def _figure(name: str, where: str) -> str:
    """`ttft_p95` stands for `ttft_p95_ns`, `prefilled` for `prefilled_tokens`."""
    for full in (name, f"{name}_ns", f"{name}_tokens", f"{name}_bytes"):
        if full in FIGURES:
            return full
    try:
        return choose_name(f"figure in {where!r}", name, FIGURES)
    except SpecError as err:
        raise SimulationError(str(err)) from None


def _bound(name: str, text: str, where: str) -> Fraction:
    if name.endswith("_ns"):
        time = _TIME.fullmatch(text)
        if time is None:
            raise SimulationError(f"condition {where!r}: {text!r} is no time; write a number with ns, us, ms or s")
        return Fraction(time["number"]) * _UNIT_NS[time["unit"]]
    if name.endswith("_bytes"):
        try:
            return Fraction(parse_size(text))
        except CapacityError as err:
            raise SimulationError(f"condition {where!r}: {err}") from None
    if not _NUMBER.fullmatch(text):
        raise SimulationError(
            f"condition {where!r}: {text!r} is no number; write a number, or a size like 2GiB where it is one of bytes"
        )
    return Fraction(text)
