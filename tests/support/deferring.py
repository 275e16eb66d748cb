"""One script of calls on an eager and on a deferring session, and whether both come to the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import ContextOverflow, KvtapeError, SessionFatal
from kvtape.backends.protocol import Backend
from kvtape.backends.session import Session
from kvtape.backends.speculation.spec import parse_speculation
from kvtape.planner.events import Op, Placement
from kvtape.planner.plan import PlanError
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink

__all__ = ["Pair", "Sessions", "calls", "opened", "take"]

Call = tuple[str, int, int]
SETTLING = ("decode", "evict", "admit", "compact", "plan", "snapshot", "policy", "logits", "score")


class Sessions:
    """A session, its backend and what it recorded."""

    def __init__(
        self, backend: Backend, policy: str, *, defer: bool, evict_by: str = "native", speculation: str | None = None
    ) -> None:
        self.backend, self.sink = backend, ListSink()
        self.session = Session(
            backend,
            parse_policy(policy),
            self.sink,
            ManualClock(),
            run_id="r",
            session_id="s",
            evict_by=evict_by,
            defer_prefill=defer,
            speculation=None if speculation is None else parse_speculation(speculation),
        )
        self.snapshots: list[int] = []

    def count(self, op: Op) -> int:
        return sum(e.op is op for e in self.sink.events)

    def account(self) -> dict[str, Any]:
        """What has to be equal once nothing waits: the tape, what is resident where, the blocks, what was decided."""
        parts = self.session._parts
        return {
            "tape": self.session.tape,
            "layout": parts.state.layout,
            "cold": [(b.start, b.stop) for b in parts.state.cold],
            "blocks": [(b.start, b.stop, b.kind, b.cache_class, b.flags, b.last_used) for b in parts.catalog.blocks()],
            "plans": [(p.trigger, p.incoming_tokens, p.total_tokens, p.hot_tokens) for p in self.sink.plans],
            "turn": parts.state.turn,
        }


def opened(make: Callable[[], Backend], policy: str, *, evict_by: str = "native") -> tuple[Sessions, Sessions]:
    """An eager session and a deferring one, on backends of their own."""
    return (
        Sessions(make(), policy, defer=False, evict_by=evict_by),
        Sessions(make(), policy, defer=True, evict_by=evict_by),
    )


def calls(max_size: int = 12) -> st.SearchStrategy[list[Call]]:
    """Calls by name with two numbers that choose the details."""
    names = ("prefix", "suffix", "suffix", "decode", *SETTLING, "restore")
    return st.lists(st.tuples(st.sampled_from(names), st.integers(0, 999), st.integers(0, 999)), max_size=max_size)


class Pair:
    """Both sessions, given the same calls. `over`: they can no longer be compared."""

    def __init__(self, eager: Sessions, lazy: Sessions, n_vocab: int, tolerance: float = 0.0) -> None:
        self.eager, self.lazy, self.n_vocab, self.tolerance = eager, lazy, n_vocab, tolerance
        self.over = False

    def play(self, script: Sequence[Call]) -> None:
        for name, a, b in script:
            if self.over:
                return
            # What an eager session evicted for a prompt that is replaced before a decode, it evicted for nothing.
            if name in ("prefix", "restore") and self.lazy.session.pending_tokens:
                self.both("logits", a, b)
            if not self.over:
                self.both(name, a, b)
        if not self.over:
            self.both("decode", 1, 3)

    def both(self, name: str, a: int, b: int) -> None:
        results, errors = [], []
        for one in (self.eager, self.lazy):
            try:
                results.append(take(one, name, a, b, self.n_vocab))
                errors.append(None)
            except SessionFatal:
                raise
            except (KvtapeError, PlanError) as err:
                errors.append(type(err))
                results.append(None)
        if errors[0] is ContextOverflow and errors[1] is None and self.lazy.session.pending_tokens:
            self.refused_later()
            return
        assert errors[0] == errors[1], f"{name}: eager {errors[0]}, deferred {errors[1]}"
        assert results[0] == results[1], f"{name}: eager {results[0]}, deferred {results[1]}"
        if not self.lazy.session.pending_tokens:
            assert self.lazy.account() == self.eager.account()
            self.same_logits()
        else:
            assert self.lazy.session.tape == self.eager.session.tape

    def refused_later(self) -> None:
        """Only a plan could tell that it does not fit: the same refusal comes with the rows, and what waits stays."""
        tape = self.lazy.session.tape
        try:
            self.lazy.session.decode(1)
        except ContextOverflow:
            evicted = self.lazy.count(Op.EVICT)
            assert self.lazy.session.tape == tape or evicted
        else:
            raise AssertionError("the eager session overflowed, the deferring one did not")
        self.over = True

    def same_logits(self) -> None:
        one, other = self.eager.session.logits, self.lazy.session.logits
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert np.abs(one - other).max() <= self.tolerance


def take(one: Sessions, name: str, a: int, b: int, n_vocab: int) -> Any:
    """One call; what of its result both sessions must agree on."""
    session = one.session
    drawn = [int(t) for t in np.random.default_rng([a, b]).integers(3, n_vocab, 1 + a % 23)]
    if name == "prefix":
        tape = session.tape
        kept = len(tape) if b % 3 else b % (len(tape) + 1)
        session.ensure_prefix([*tape[:kept], *drawn], need_logits=bool(a % 2))
    elif name == "suffix":
        session.prefill_suffix(drawn, kind=("user", "system", "tool")[b % 3])
    elif name == "decode":
        return session.decode(1 + a % 7, stop_tokens=frozenset())
    elif name == "evict":
        # By the tape, which both have: what is resident is known only once nothing waits.
        start = b % max(1, len(session.tape))
        session.evict(start, start + 1 + a % 5)
    elif name == "admit":
        _ = session.logits  # which blocks are cold is known once nothing waits
        cold = sorted(session._parts.state.cold, key=lambda c: (c.start, c.block_id))
        block = cold[a % len(cold)].block_id if cold else 12345
        session.admit(block, Placement.APPEND if b % 2 else Placement.IN_PLACE)
    elif name == "compact":
        return session.compact()
    elif name == "plan":
        session.plan_now(2 + a % 40)
    elif name == "snapshot":
        one.snapshots.append(session.snapshot())
    elif name == "restore":
        if one.snapshots:
            session.restore(one.snapshots[a % len(one.snapshots)])
    elif name == "policy":
        session.set_policy(session._parts.policy)
    elif name == "score":
        session.score(drawn[:4])
    elif name == "logits":
        _ = session.logits
    return None
