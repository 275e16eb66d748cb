"""What `fidelity.py` records: chats that let every operation happen, on log A and, with other texts, on the others."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from kvtape.backends.protocol import Clock, Engine, SessionConfig
from kvtape.backends.session import Session
from kvtape.cli.engine_text import essay
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.traces.recorder import Recorder

__all__ = ["LEARNT", "PREDICTED", "Case", "record"]


@dataclass(frozen=True)
class Case:
    """A chat about `paragraphs` of the demo's essay, `decode` tokens each turn; `session` names it in its log.

    `cold`: tokens of the cold store. `again`: every second answer is thrown away and asked for again, longer.
    `saves`: the state is saved after the third turn and put back after the fifth.
    """

    session: str
    paragraphs: tuple[int, int]
    policy: str
    n_ctx: int
    chunk: int
    decode: int
    cold: int = 0
    evict_by: str = "native"
    again: bool = False
    saves: bool = False


LEARNT = (
    Case("A-stream", (0, 7), "stream:sink=4,recent=300", 640, 128, 32, again=True),
    Case("A-moved", (3, 10), "stream:sink=4,recent=260,positions=rebased", 704, 96, 24, again=True),
    Case("A-class", (5, 10), "class:budget=400", 768, 64, 20),
    Case("A-cold", (2, 8), "class:budget=450", 704, 128, 24, cold=4096, again=True, saves=True),
    Case("A-again", (4, 9), "class:budget=300,hole=forget", 448, 128, 24, evict_by="recompute", again=True),
)
PREDICTED = (
    Case("B", (10, 18), "stream:sink=4,recent=300", 512, 128, 32),
    Case("C", (12, 17), "class:budget=380", 768, 96, 24),
    Case("D", (11, 17), "class:budget=420", 576, 96, 28, cold=4096, again=True, saves=True),
    Case("E", (13, 19), "stream:sink=4,recent=240", 480, 96, 28, evict_by="recompute", again=True),
    Case("F", (9, 16), "stream:sink=4,recent=280,positions=rebased", 576, 128, 28, again=True),
)


def record(recorder: Recorder, engine: Engine, case: Case, clock: Clock) -> None:
    """A session of the log. It is written when it has ended: nothing else runs while the engine does."""
    print(f"recording {case.session} into {recorder.path.name}", file=sys.stderr, flush=True)
    held = ListSink()
    config = SessionConfig(n_ctx=case.n_ctx, chunk=case.chunk, threads=1, cold_budget_tokens=case.cold)
    names = {"run_id": recorder.run_id, "session_id": case.session, "evict_by": case.evict_by}
    with Session(engine.open(config), parse_policy(case.policy), held, clock, content=True, **names) as session:
        _play(engine, session, case)
    _write(held, recorder)


def _write(held: ListSink, recorder: Recorder) -> None:
    for row in held.sessions:
        recorder.open_session(row)
    plans = {plan.seq: plan for plan in held.plans}
    for event in held.events:
        recorder.record(
            event,
            tokens=held.tokens.get(event.seq),
            plan=plans.get(event.seq),
            blocks=[b for b in held.blocks if b.seq == event.seq],
            scores=[s for s in held.scores if s.seq == event.seq],
        )
    recorder.flush()


def _play(engine: Engine, session: Session, case: Case) -> None:
    def segment(kind: str, text: str) -> PromptSegment:
        return PromptSegment(kind=kind, tokens=tuple(engine.tokenize(text)))

    cue, blank, transcript = segment("assistant_prompt", "assistant:"), segment("assistant", "\n\n"), []
    saved = None
    for turn, text in enumerate(_paragraphs()[slice(*case.paragraphs)], 1):
        transcript.append(segment("user", f"user: {text}\n\n"))
        session.ensure_prefix([*transcript, cue])
        answer = session.decode(case.decode, stop_tokens=frozenset()).tokens
        if case.again and turn % 2 == 0:
            session.ensure_prefix([*transcript, segment("assistant_prompt", "Once more, assistant:")])
            answer = session.decode(case.decode + 8, stop_tokens=frozenset()).tokens
        if case.saves and turn == 3:
            saved = session.snapshot()
        if case.saves and turn == 5 and saved is not None:
            session.restore(saved)
        transcript += [cue, PromptSegment(kind="assistant", tokens=tuple(answer)), blank]


def _paragraphs() -> list[str]:
    return [p.strip()[:900] for p in essay().split("\n\n") if len(p.strip()) > 80]
