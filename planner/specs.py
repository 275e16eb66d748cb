"""Policy specs: what is kept, as one line of text. The grammar itself is in `grammar`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast

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
from kvtape.planner.layer_choice import LATE, canonical_layers, read_layers
from kvtape.planner.plan import Plan, StreamPolicy, plan_hot_set
from kvtape.planner.policy_options import OPTIONS, POLICY_NAMES
from kvtape.planner.ranked import plan_random, plan_scored
from kvtape.planner.scores import Norm, ScoreKind, ScoreRequest
from kvtape.planner.table import BlockTable
from kvtape.planner.user_policy import load_function, plan_user
from kvtape.planner.ways import Positions, available_ways

__all__ = [
    "DEFAULT_SINK",
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
    "policy_with",
]

DEFAULT_SINK = 4
"""Sink tokens of a `stream` that gets its spans from a budget and names no `sink`: what Xiao et al. 2023 keep."""

Hole = Literal["forget", "refill"]
"""What a later turn does about an evicted hole below its common prefix: run past it, or fill it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """A policy with every option resolved; spans, budget, `every`, `block`, `window` and `pool` in tokens.

    `recent >= 1` always: the last resident token before a prefill or decode is never evicted; under `snapkv` the
    window that asks is never evicted either, so there `recent >= window`. `budget` is None where the context alone
    is the limit. `every`: plan again only after so many new tokens. `function` is `module:function`, for `user` only.
    Raises SpecError when built with values that the spec text could not have, or a function that is not there.
    """

    name: str
    function: str | None = None
    sink: int = 0
    recent: int = 1
    budget: int | None = None
    seed: int | None = None
    scores: Literal["none", "accumulated", "window", "probe"] = "none"
    norm: Norm = "sum"
    window: int = 32
    pool: int = 1
    queries: Literal["window", "probe"] = "window"
    layers: str = "all"
    heads: Literal["sum", "max"] = "sum"
    grace: int = 0
    positions: Positions = "auto"
    every: int = 1
    hole: Hole = "refill"
    block: int = DEFAULT_BLOCK
    split: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", canonical_layers(self.layers))
        object.__setattr__(self, "recent", _recent_of(self.name, self.queries, self.recent, self.window))
        # The text is the one gate for values, also of a policy that was built in code.
        meant = {f.name: f.default for f in fields(self)} | _read_policy(self.canonical)
        for key, value in meant.items():
            if getattr(self, key) != value:
                raise SpecError(f"policy {self.name} has no {key}={getattr(self, key)!r}")
        if self.function is not None:
            load_function(self.function)
        if self.pool % 2 == 0:
            raise SpecError(f"policy {self.canonical}: pool={self.pool} must be odd, so that a token is its middle")
        self._check_window()
        if self.budget is not None and self.budget < self.sink + self.recent + 1:
            raise SpecError(
                f"policy {self.canonical}: budget {self.budget} is smaller than sink + recent + 1 "
                f"({self.sink} + {self.recent} + 1); raise the budget or lower sink and recent"
            )

    def _check_window(self) -> None:
        if self.name != "snapkv":
            return
        if self.queries == "probe" and self.window != OPTIONS["snapkv"]["window"].default:
            raise SpecError(f"policy {self.canonical}: window= has no meaning beside queries=probe; leave it out")
        if self.queries == "window" and self.recent < self.window:
            raise SpecError(
                f"policy {self.canonical}: recent {self.recent} is smaller than window {self.window}, whose "
                "tokens ask and are never evicted; raise recent, lower window or leave recent out"
            )

    @property
    def canonical(self) -> str:
        """The spec text: required options and those that differ from their default, in a fixed order."""
        if self.name != "user" or self.function is None:
            choose_name("policy", self.name, POLICY_NAMES)
        parts = []
        for key, option in OPTIONS[self.name].items():
            value = getattr(self, key)
            implied = (
                self.name == "snapkv"
                and key == "recent"
                and value == _recent_of("snapkv", self.queries, 1, self.window)
            )
            if value != option.default and not implied:
                text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
                parts.append((key, text))
        name = self.name if self.function is None else self.function.partition(":")[0]
        return str(Spec(name, tuple(parts), self.function))

    @property
    def evicts(self) -> bool:
        """Whether the policy ever plans."""
        return self.name != "none"

    @property
    def score_request(self) -> ScoreRequest | None:
        """What has to be measured before each plan; None for a policy that looks at no scores."""
        kinds = {"h2o": "accumulated", "tova": "window", "opt": "later", "snapkv": self.queries, "user": self.scores}
        kind: str = kinds.get(self.name, "none")
        if kind == "none":
            return None
        asking = 1 if self.name == "tova" else self.window
        return ScoreRequest(
            cast("ScoreKind", kind),
            asking if kind == "window" else None,
            read_layers(self.layers),
            self.heads,
            self.layers == LATE,
        )

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
        self,
        blocks: Iterable[Block] | BlockTable,
        *,
        budget: int,
        capabilities: Capabilities,
        allow_recompute: bool = False,
    ) -> Plan | None:
        """The plan for `budget` tokens; None for a policy that never evicts.

        A scored policy ranks by the scores on the blocks. Raises PlanError (KeepRejected for a policy function).
        """
        if not self.evicts:
            return None
        can_evict = bool(self.ways(capabilities, allow_recompute))
        sink, recent, grace, split = self.sink, self.recent, self.grace, self.split
        if self.function is not None:
            function = load_function(self.function)
            return plan_user(
                blocks,
                budget=budget,
                sink=sink,
                recent=recent,
                target=self.function,
                function=function,
                can_evict=can_evict,
            )
        if self.seed is not None:
            return plan_random(
                blocks,
                budget=budget,
                sink=sink,
                recent=recent,
                grace=grace,
                split=split,
                seed=self.seed,
                can_evict=can_evict,
            )
        if self.score_request is not None:
            return plan_scored(
                blocks,
                budget=budget,
                sink=sink,
                recent=recent,
                grace=grace,
                split=split,
                can_score=capabilities.attention_scores,
                can_evict=can_evict,
            )
        return plan_hot_set(
            blocks,
            budget=budget,
            sink=sink,
            recent=recent,
            stream=StreamPolicy(sink, recent) if self.name == "stream" else None,
            capabilities=capabilities,
            allow_recompute=allow_recompute,
            split=split,
            positions=self.positions,
        )


def parse_policy(text: str) -> PolicySpec:
    """The policy that `text` names. Raises SpecError, which lists what is allowed and the nearest name."""
    values: dict[str, Any] = _read_policy(text)
    return PolicySpec(**values)


def policy_with(spec: Spec, given: Mapping[str, str]) -> PolicySpec:
    """The policy that `spec` names, with the options `given` in place of its own. Raises SpecError."""
    return parse_policy(str(Spec(spec.name, tuple(given.items()), spec.target)))


def _read_policy(text: str) -> dict[str, OptionValue]:
    """Every field that the text settles."""
    spec = parse_spec(text)
    if spec.target is not None and spec.name not in POLICY_NAMES:
        values = parse_options(Spec(spec.target, spec.args), OPTIONS["user"])
        return {"name": "user", "function": spec.target} | values
    choose_name("policy", spec.name, POLICY_NAMES, also="module:function")
    values = parse_options(spec, OPTIONS[spec.name])
    if spec.name == "snapkv":
        values["recent"] = _recent_of(spec.name, values["queries"], values["recent"], values["window"])
    return {"name": spec.name} | values


def _recent_of(name: str, queries: OptionValue, recent: OptionValue, window: OptionValue) -> OptionValue:
    """The recent span when `recent` was given: under snapkv, one that was left out is the window that asks."""
    left_out = name == "snapkv" and queries == "window" and recent == OPTIONS["snapkv"]["recent"].default
    return window if left_out else recent
