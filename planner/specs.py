"""Policy specs: what is kept, as one line of text. The grammar itself is in `grammar`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from kvtape.planner.blocks import DEFAULT_BLOCK, Block
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Way
from kvtape.planner.grammar import (
    REQUIRED,
    Option,
    OptionValue,
    Spec,
    SpecError,
    choose_name,
    parse_options,
    parse_spec,
)
from kvtape.planner.plan import Plan, StreamPolicy, plan_hot_set
from kvtape.planner.ways import Positions, available_ways

__all__ = [
    "POLICY_NAMES",
    "REQUIRED",
    "Hole",
    "Option",
    "OptionValue",
    "PolicySpec",
    "Spec",
    "SpecError",
    "choose_name",
    "parse_options",
    "parse_policy",
    "parse_spec",
]

Hole = Literal["forget", "refill"]
"""What a later turn does about an evicted hole below its common prefix: run past it, or fill it again."""

_COMMON: dict[str, Option] = {
    "positions": Option(str, "auto", ("auto", "gap", "rebased")),
    "every": Option(int, 1, (1, None)),
    "hole": Option(str, "refill", ("forget", "refill")),
    "block": Option(int, DEFAULT_BLOCK, (1, None)),
}

# Key order of the canonical text; what is REQUIRED is always written.
_OPTIONS: dict[str, dict[str, Option]] = {
    "none": _COMMON,
    "stream": {
        "sink": Option(int, REQUIRED, (0, None)),
        "recent": Option(int, REQUIRED, (1, None)),
        **_COMMON,
        # Under streaming a chat turn must not prefill its own history again.
        "hole": Option(str, "forget", ("forget", "refill")),
        "split": Option(bool, True),
    },
    "class": {
        "budget": Option(int, REQUIRED, (1, None)),
        "sink": Option(int, 0, (0, None)),
        "recent": Option(int, 1, (1, None)),
        **_COMMON,
        "split": Option(bool, False),
    },
}

POLICY_NAMES = tuple(sorted(_OPTIONS))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy with every option resolved; spans, budget, `every` and `block` in tokens.

    `recent >= 1` always: the last resident token before a prefill or decode is never evicted. `budget` is None
    where the context alone is the limit. `every`: plan again only after so many new tokens.
    Raises SpecError when built with values that the spec text could not have.
    """

    name: str
    sink: int = 0
    recent: int = 1
    budget: int | None = None
    positions: Positions = "auto"
    every: int = 1
    hole: Hole = "refill"
    block: int = DEFAULT_BLOCK
    split: bool = False

    def __post_init__(self) -> None:
        # The text is the one gate for values, also of a policy that was built in code.
        meant = {f.name: f.default for f in fields(self)} | {"name": self.name} | _read_policy(self.canonical)
        for key, value in meant.items():
            if getattr(self, key) != value:
                raise SpecError(f"policy {self.name} has no {key}={getattr(self, key)!r}")
        if self.budget is not None and self.budget < self.sink + self.recent + 1:
            raise SpecError(
                f"policy {self.canonical}: budget {self.budget} is smaller than sink + recent + 1 "
                f"({self.sink} + {self.recent} + 1); raise the budget or lower sink and recent"
            )

    @property
    def canonical(self) -> str:
        """The spec text: required options and those that differ from their default, in a fixed order."""
        choose_name("policy", self.name, POLICY_NAMES)
        parts = []
        for key, option in _OPTIONS[self.name].items():
            value = getattr(self, key)
            if value != option.default:
                text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
                parts.append((key, text))
        return str(Spec(self.name, tuple(parts)))

    @property
    def evicts(self) -> bool:
        """Whether the policy ever plans."""
        return self.name != "none"

    def limit(self, n_ctx: int) -> int:
        """Tokens that may be resident; an operation that would pass it is planned for first."""
        return n_ctx if self.budget is None else min(n_ctx, self.budget)

    def check_context(self, n_ctx: int) -> None:
        """Raises SpecError when a context of `n_ctx` tokens does not hold sink + recent and one new token."""
        needed = self.sink + self.recent + 1
        if needed > n_ctx:
            raise SpecError(
                f"policy {self.canonical} needs a context of at least {needed} tokens "
                f"(sink {self.sink} + recent {self.recent} + 1), this one has {n_ctx}; "
                "raise the context or lower recent"
            )

    def ways(self, capabilities: Capabilities, allow_recompute: bool = False) -> tuple[Way, ...]:
        """The ways that may carry out this policy's evictions on such a session, cheapest first."""
        return available_ways(capabilities, allow_recompute, self.positions)

    def plan(
        self, blocks: Iterable[Block], *, budget: int, capabilities: Capabilities, allow_recompute: bool = False
    ) -> Plan | None:
        """The plan for `budget` tokens; None for a policy that never evicts. Raises PlanError."""
        if not self.evicts:
            return None
        return plan_hot_set(
            blocks,
            budget=budget,
            sink=self.sink,
            recent=self.recent,
            stream=StreamPolicy(self.sink, self.recent) if self.name == "stream" else None,
            capabilities=capabilities,
            allow_recompute=allow_recompute,
            split=self.split,
            positions=self.positions,
        )


def parse_policy(text: str) -> PolicySpec:
    """The policy that `text` names. Raises SpecError, which lists what is allowed and the nearest name."""
    spec = parse_spec(text)
    values: dict[str, Any] = _read_policy(text)
    return PolicySpec(name=spec.name, **values)


def _read_policy(text: str) -> dict[str, OptionValue]:
    spec = parse_spec(text)
    if spec.target is not None and spec.name not in _OPTIONS:
        raise SpecError(f"policy {text!r} names a function; allowed: {', '.join(POLICY_NAMES)}")
    choose_name("policy", spec.name, POLICY_NAMES)
    return parse_options(spec, _OPTIONS[spec.name])
