"""Policies by name, and a class of the user's own by `module:Class`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvtape.planner.grammar import SpecError, choose_name, parse_spec
from kvtape.planner.own_code import load_named
from kvtape.sim.blocks.policies.adaptive import Arc
from kvtape.sim.blocks.policies.frequency import Lfu
from kvtape.sim.blocks.policies.protocol import PolicyClass
from kvtape.sim.blocks.policies.s3fifo import S3Fifo
from kvtape.sim.blocks.policies.sieve import Sieve
from kvtape.sim.blocks.policies.simple import Fifo, Lru
from kvtape.sim.blocks.policies.tinylfu import WTinyLfu

__all__ = ["CLASSES", "POLICY_NAMES", "PolicyChoice", "choose_policy"]

CLASSES: Final[Mapping[str, PolicyClass]] = MappingProxyType(
    {"arc": Arc, "fifo": Fifo, "lfu": Lfu, "lru": Lru, "s3fifo": S3Fifo, "sieve": Sieve, "w-tinylfu": WTinyLfu}
)
"""Those that decide from the past alone."""

POLICY_NAMES: Final = (*CLASSES, "opt")
"""`opt` knows the future and is no class: it is computed over the whole trace at once."""


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """`make` is None for opt. `own`: written by the user, so what it answers is checked."""

    name: str
    make: PolicyClass | None
    own: bool = False


def choose_policy(text: str) -> PolicyChoice:
    """Raises SpecError: an unknown name, options (there are none), a module or class that is not there."""
    spec = parse_spec(text)
    if spec.args:
        raise SpecError(f"policy {text!r}: policies of a curve take no options; the budgets are --budget-blocks")
    if spec.target is not None:
        return PolicyChoice(spec.target, _own(spec.target), own=True)
    name = choose_name("policy", spec.name, POLICY_NAMES, also="module:Class")
    return PolicyChoice(name, CLASSES.get(name))


def _own(target: str) -> PolicyClass:
    made: PolicyClass = load_named(target, "class")
    return made
