"""One session for each operation of a backend: how it is prepared, and the call that comes to that operation first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvtape.backends.clock import ManualClock
from kvtape.backends.protocol import Backend, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink

__all__ = ["PLAYS", "PROMPT", "Play", "start"]

PROMPT = [int(t) for t in np.random.default_rng(5).integers(3, 259, 40)]
MORE = [int(t) for t in np.random.default_rng(6).integers(3, 259, 20)]


@dataclass(frozen=True, slots=True)
class Play:
    """`session_call` names what the user calls, `act` calls it; `before` brings the session to where it
    can be called.
    """

    session_call: str
    act: Callable[[Session], object]
    before: Callable[[Session], object] = lambda session: None
    policy: str = "none:block=4,hole=forget"
    cold: int = 0
    options: dict[str, str] = field(default_factory=dict)
    evict_by: str = "native"

    @property
    def config(self) -> SessionConfig:
        return SessionConfig(
            n_ctx=256, chunk=64, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=self.cold, options=self.options
        )


def _decode(session: Session) -> object:
    return session.decode(3, choose=lambda _: 7, stop_tokens=frozenset())


def _evict(session: Session) -> object:
    return session.evict(4, 8)


SCORES = {"scores": "on"}

PLAYS: dict[str, Play] = {
    "prefill": Play("prefill_suffix", lambda s: s.prefill_suffix(MORE)),
    "decode_until": Play("decode", _decode),
    "truncate": Play("ensure_prefix", lambda s: s.ensure_prefix([*PROMPT[:20], *MORE])),
    "evict": Play("evict", _evict),
    "shift": Play("compact", lambda s: s.compact(), before=_evict),
    "export_block": Play("evict", _evict, cold=64),
    "admit": Play("admit", lambda s: s.admit(s.cold_block_ids[0]), before=_evict, cold=64),
    "refill": Play(
        "ensure_prefix",
        lambda s: s.ensure_prefix([*s.tape, 7]),
        before=_evict,
        policy="none:block=4,hole=refill",
    ),
    "rebuild": Play("evict", _evict, evict_by="recompute"),
    "snapshot": Play("snapshot", lambda s: s.snapshot()),
    "restore": Play("restore", lambda s: s.restore(0), before=lambda s: (s.snapshot(), _decode(s))),
    "score": Play("score", lambda s: s.score(MORE[:4]), options=SCORES),
    "take_mass": Play(
        "plan_now", lambda s: s.plan_now(20), before=_decode, policy="h2o:budget=200,recent=8,block=4", options=SCORES
    ),
}
"""By operation of `protocol.Backend`. `before` runs behind a prefill of PROMPT."""


def start(play: Play, backend: Backend, session_id: str, sink: ListSink) -> Session:
    """A session that is prepared; its next call of `play.act` comes to the operation."""
    session = Session(
        backend,
        parse_policy(play.policy),
        sink,
        ManualClock(),
        run_id="faults",
        session_id=session_id,
        evict_by=play.evict_by,
    )
    session.ensure_prefix(PROMPT)
    play.before(session)
    return session
