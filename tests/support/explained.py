"""Recorded sessions, made by a toy, as `kvtape.sim.explain` reads them; and random plays for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from kvtape.backends.errors import KvtapeError
from kvtape.backends.session import Session
from kvtape.planner.blocks import PromptSegment
from kvtape.sim.explain.moment import RecordedSession
from kvtape.testing.sink import ListSink
from support.simulated import recorded_toy

__all__ = ["PLAYS", "play_steps", "recorded", "session_of"]

Step = tuple[str, int, int]

PLAYS: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(
        st.sampled_from(
            [
                "prefix",
                "again",
                "grow",
                "pinned",
                "suffix",
                "decode",
                "decode",
                "evict",
                "admit",
                "plan",
                "cut",
                "save",
                "back",
            ]
        ),
        st.integers(0, 999),
        st.integers(0, 999),
    ),
    min_size=2,
    max_size=14,
)


def session_of(sink: ListSink) -> RecordedSession:
    plans = {plan.seq: plan for plan in sink.plans}
    return RecordedSession(sink.sessions[0], tuple(sink.events), tuple(sink.blocks), plans, tuple(sink.scores))


def recorded(
    play: Callable[[Session], None],
    policy: str,
    *,
    n_ctx: int = 48,
    chunk: int = 8,
    cold_tokens: int = 32,
    scores: bool = False,
    evict_by: str = "native",
    defer: bool = False,
) -> RecordedSession:
    """What `play` leaves behind."""
    return session_of(
        recorded_toy(
            play,
            policy,
            n_ctx=n_ctx,
            chunk=chunk,
            cold_tokens=cold_tokens,
            scores=scores,
            evict_by=evict_by,
            defer=defer,
        )
    )


def play_steps(steps: Sequence[Step]) -> Callable[[Session], None]:
    """Calls that fit or are refused; what is refused goes on."""

    def play(session: Session) -> None:
        saved: list[int] = []
        session.ensure_prefix(_tokens(9, 0))
        for kind, a, b in steps:
            with contextlib.suppress(KvtapeError):
                _step(session, saved, kind, a, b)

    return play


def _tokens(n: int, seed: int) -> list[int]:
    return [(seed * 7 + i * i) % 50 for i in range(n)]


def _step(session: Session, saved: list[int], kind: str, a: int, b: int) -> None:
    tape = list(session.tape)
    if kind == "prefix":
        session.ensure_prefix(_tokens(1 + a % 60, b))
    elif kind == "again":
        session.ensure_prefix(tape, need_logits=bool(b % 2))
    elif kind == "grow":
        session.ensure_prefix([*tape, *_tokens(1 + a % 20, b)])
    elif kind == "cut":
        session.ensure_prefix([*tape[: a % len(tape)], *_tokens(1 + b % 9, b)])
    elif kind == "pinned":
        kinds = ("system", "user", "repo_map", "tool")
        session.ensure_prefix(
            [PromptSegment(kind=k, tokens=tuple(_tokens(1 + (a + i) % 11, b + i))) for i, k in enumerate(kinds)]
        )
    elif kind == "suffix":
        session.prefill_suffix(_tokens(1 + a % 12, b), kind=("user", "tool")[b % 2])
    elif kind == "decode":
        session.decode(1 + a % 12, stop_tokens=frozenset())
    elif kind == "evict" and session.resident:
        ranges = session.resident.ranges
        chosen = ranges[a % len(ranges)]
        start = chosen.start + b % len(chosen)
        session.evict(start, min(chosen.stop, start + 1 + a % 9))
    elif kind == "admit":
        session.admit((*session.cold_block_ids, 999)[a % (len(session.cold_block_ids) or 1)])
    elif kind == "plan":
        session.plan_now(max(2, len(tape) // 2))
    elif kind == "save":
        saved.append(session.snapshot())
    elif kind == "back":
        session.restore(saved[a % len(saved)] if saved else 99)
