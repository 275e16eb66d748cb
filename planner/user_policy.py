"""A policy of the user's own: a function `view -> ids of the blocks to keep`, named `module:function`.

    def keep(view: PolicyView) -> Iterable[int]:
        newest_first = sorted(view.candidates, key=lambda b: -b.start)
        ...

The function must be pure: the same view, the same answer. Whatever it answers is checked before anything is evicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kvtape.planner.blocks import Block
from kvtape.planner.outcome import Diagnostic, Plan, make_plan
from kvtape.planner.own_code import load_named
from kvtape.planner.plan import prepared
from kvtape.planner.plan_errors import PlanError
from kvtape.planner.table import BlockTable

__all__ = [
    "KeepFunction",
    "KeepRejected",
    "NoBlockIds",
    "PolicyFailed",
    "PolicyView",
    "ProtectedDropped",
    "UnknownBlock",
    "load_function",
    "plan_user",
]


@dataclass(frozen=True)
class PolicyView:
    """What a policy function sees. `blocks` are the resident ones in tape order; `budget` is in tokens.

    `protected`: ids that the answer must contain (pinned blocks, the sink and recent spans).
    """

    budget: int
    blocks: tuple[Block, ...]
    protected: frozenset[int]

    @cached_property
    def candidates(self) -> tuple[Block, ...]:
        """The blocks that may be left out, in tape order."""
        return tuple(b for b in self.blocks if b.block_id not in self.protected)

    @property
    def total(self) -> int:
        """Resident tokens."""
        return sum(b.n_tokens for b in self.blocks)

    @property
    def protected_tokens(self) -> int:
        """Tokens of the protected blocks."""
        return self.total - sum(b.n_tokens for b in self.candidates)


KeepFunction = Callable[[PolicyView], Iterable[int]]


class KeepRejected(PlanError):
    """What a policy function did cannot be planned; names the function. Nothing is evicted."""

    def __init__(self, target: str, why: str) -> None:
        super().__init__(f"policy {target}: {why}")
        self.target = target


class PolicyFailed(KeepRejected):
    """The function raised; the cause is chained."""


class NoBlockIds(KeepRejected):
    """The answer is no iterable of whole numbers."""


class UnknownBlock(KeepRejected):
    """The answer names a block that is not resident, or one twice."""


class ProtectedDropped(KeepRejected):
    """The answer leaves out a block that may not be evicted."""


def load_function(target: str) -> KeepFunction:
    """The function that `module:function` names. Raises SpecError when there is none."""
    function: KeepFunction = load_named(target, "function")
    return function


def plan_user(
    blocks: Iterable[Block] | BlockTable,
    *,
    budget: int,
    sink: int = 0,
    recent: int = 1,
    target: str,
    function: KeepFunction,
    can_evict: bool,
) -> Plan:
    """The plan that keeps what `function` says; `target` names it in errors. Blocks are kept or evicted whole.

    It is not asked when nothing can be evicted. Raises KeepRejected (PolicyFailed, NoBlockIds, UnknownBlock,
    ProtectedDropped), BadBudget, BadSpan, InvalidBlock, OverlappingBlocks, BadScore.
    """
    table, free = prepared(blocks, budget, sink, recent, split=False)
    if not can_evict:
        return make_plan(table, free, np.empty(0, dtype=np.int64), budget, [Diagnostic.EVICT_UNSUPPORTED])
    view = PolicyView(budget, tuple(table.blocks), frozenset(table.ids[~free.mask].tolist()))
    keep = _answer(target, function, view)
    kept = np.isin(table.ids, np.fromiter(keep, np.int64, len(keep)))
    return make_plan(table, free, np.flatnonzero(~kept), budget, [])


def _answer(target: str, function: KeepFunction, view: PolicyView) -> frozenset[int]:
    try:
        answer: object = function(view)
        # A generator fails only now.
        given = list(answer) if isinstance(answer, Iterable) else None
    except (Exception, SystemExit) as err:
        raise PolicyFailed(target, f"{type(err).__name__}: {err}") from err
    if given is None:
        raise NoBlockIds(target, f"answered {answer!r}; return the ids of the blocks to keep")
    odd = next((i for i in given if isinstance(i, bool) or not isinstance(i, int | np.integer)), None)
    if odd is not None:
        raise NoBlockIds(target, f"answered {odd!r}; return the ids of the blocks to keep, whole numbers")
    keep = frozenset(int(i) for i in given)
    unknown = sorted(keep - {b.block_id for b in view.blocks})
    if unknown:
        raise UnknownBlock(target, f"keeps {_some(unknown)}, which are not resident; take ids from view.blocks")
    if len(keep) != len(given):
        raise UnknownBlock(target, "names a block twice")
    dropped = sorted(view.protected - keep)
    if dropped:
        raise ProtectedDropped(target, f"drops {_some(dropped)}, which are protected; always add view.protected")
    return keep


def _some(ids: list[int]) -> str:
    return f"blocks {', '.join(map(str, ids[:5]))}{', ...' if len(ids) > 5 else ''}"
