"""Recorded sessions in memory, and costs made up for tests of the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvtape.backends.clock import ManualClock, StoppableClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.shadow import Shadow
from kvtape.planner.events import Event
from kvtape.planner.rows import BlockRow, PlanRow, RunRow, SessionRow, TokensRow
from kvtape.planner.specs import parse_policy
from kvtape.sim.costs.model import CostTable, KindCosts, Origin
from kvtape.sim.costs.terms import TERMS
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.script import Script
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import open_toy
from support.attention_maps import map_of
from support.logs import run_row

__all__ = ["MemoryLog", "flat_costs", "play_two_turns", "recorded_toy", "scored_script"]


@dataclass
class MemoryLog:
    """What the simulator reads of a log, from sinks: one session each."""

    sinks: list[ListSink] = field(default_factory=list)

    def default_run(self) -> RunRow:
        return run_row("r")

    def sessions(self, run_id: str) -> Sequence[SessionRow]:
        return [sink.sessions[0] for sink in self.sinks]

    def events(self, run_id: str, session_id: str) -> Sequence[Event]:
        return self._of(session_id).events

    def tokens(self, run_id: str, session_id: str) -> Mapping[int, TokensRow]:
        found = {}
        for seq, tokens in self._of(session_id).tokens.items():
            found[seq] = TokensRow(
                run_id="r",
                session_id=session_id,
                seq=seq,
                start=0,
                n_tokens=len(tokens),
                block_tokens=32,
                hashes="[]",
                mac=None,
                tokens=tokens,
            )
        return found

    def blocks(self, run_id: str, session_id: str) -> Sequence[BlockRow]:
        return self._of(session_id).blocks

    def plans(self, run_id: str, session_id: str) -> Mapping[int, PlanRow]:
        return {plan.seq: plan for plan in self._of(session_id).plans}

    def logical_digest(self, run_id: str) -> str:
        return "0" * 64

    def _of(self, session_id: str) -> ListSink:
        return next(sink for sink in self.sinks if sink.sessions[0].session_id == session_id)


def recorded_toy(
    play: Callable[[Session], None],
    policy: str = "stream:sink=4,recent=20,block=8",
    *,
    n_ctx: int = 64,
    chunk: int = 8,
    cold_tokens: int = 32,
    session_id: str = "s",
    clock: ManualClock | None = None,
    scores: bool = False,
    dense_every: int | None = None,
    evict_by: str = "native",
    defer: bool = False,
) -> ListSink:
    """What `play` leaves behind on a toy. `dense_every`: dense attention beside it, so many queries at a time."""
    sink = ListSink()
    options = {"scores": "on"} if scores else {}
    config = SessionConfig(n_ctx=n_ctx, chunk=chunk, cold_budget_tokens=cold_tokens, options=options)
    time = StoppableClock(clock or ManualClock(1000))
    wide = SessionConfig(n_ctx=1024, chunk=chunk, options={"scores": "on"})
    shadow = None if dense_every is None else Shadow(open_toy(wide), time, dense_every)
    session = Session(
        open_toy(config),
        parse_policy(policy),
        sink,
        time,
        run_id="r",
        session_id=session_id,
        evict_by=evict_by,
        shadow=shadow,
        defer_prefill=defer,
    )
    with session:
        play(session)
    return sink


def scored_script(sink: ListSink) -> Script:
    """The session's script with the dense attention that was recorded of it."""
    (script,) = read_scripts(MemoryLog([sink]))
    return replace(script, attention=map_of(sink))


def flat_costs(row_bytes: int = 100, *, without: Sequence[str] = (), **per_token: float) -> CostTable:
    """Every kind costs 1000 ns a call and nothing else, but for `per_token` ns a token of the kinds named."""
    kinds = {}
    for kind, terms in TERMS.items():
        if kind not in without:
            rates = {"call": 0.0 if kind in ("plan", "session") else 1000.0, "token": per_token.get(kind, 0.0)}
            kinds[kind] = KindCosts(tuple(rates.get(term.name, 0.0) for term in terms))
    return CostTable(Origin(backend="toy", row_bytes=row_bytes, hypothetical=True), kinds)


def play_two_turns(session: Session) -> None:
    """A prompt of 40 tokens and one of 9 behind it, each with an answer: more than a context of 64 holds."""
    session.ensure_prefix([i % 50 for i in range(40)])
    session.decode(12, stop_tokens=frozenset())
    session.ensure_prefix([*session.tape, *range(9)])
    session.decode(30, stop_tokens=frozenset())
