"""A log of as many events as one likes: real sessions of a streaming policy on the modelled backend, and no engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from kvtape.backends.modelled.backend import ModelledBackend
from kvtape.backends.modelled.clock import VirtualTimeline
from kvtape.backends.modelled.shape import Shape
from kvtape.backends.modelled.work import Work
from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.rows import BlockRow
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from kvtape.testing.toy import TOY_CAPABILITIES
from kvtape.traces.recorder import Recorder
from support.logs import KEY, run_row

__all__ = ["write_long_log"]

POLICY = "stream:sink=4,recent=700"
CONFIG = SessionConfig(n_ctx=1024, chunk=128, cold_budget_tokens=512)
BLOCK = 32
FACTS = ModelFacts("toy", "toy/1", "toy", 1024, 1 << 30, frozenset())


class _Price:
    """Nanoseconds of an operation: dear where much is computed, never nothing."""

    def cost_ns(self, work: Work) -> int:
        return 20_000 + 250_000 * work.tokens


def write_long_log(path: Path, sizes: Sequence[int], names: Sequence[str] = ()) -> Path:
    """Sessions of at least `sizes[i]` events each, named `names[i]` (default `session-1`, ...), in one sealed log.

    Each is a conversation of prompts (some with a changed middle, so that the tape is cut and filled again), decodes
    and admitted blocks, drawn from a generator seeded with its place.
    """
    clock = VirtualTimeline()
    recorder = Recorder(path, run_row("long"), clock=clock, key=KEY, max_latency_s=60)
    for number, size in enumerate(sizes):
        name = names[number] if number < len(names) else f"session-{number + 1}"
        _write(_converse(name, size, clock, random.Random(number)), recorder)
    recorder.seal()
    return path


def _converse(name: str, size: int, clock: VirtualTimeline, draw: random.Random) -> ListSink:
    held = ListSink()
    backend = ModelledBackend(Shape(FACTS, CONFIG, CONFIG.n_ctx, TOY_CAPABILITIES, 7, "toy"), _Price(), clock)
    session = Session(backend, parse_policy(POLICY), held, clock, run_id="long", session_id=name, content=True)
    session.ensure_prefix([draw.randrange(1024) for _ in range(96)])
    while len(held.events) < size:
        if draw.random() < 0.02:
            # A prompt that has only the beginning of the conversation in common with the tape.
            kept = list(session.tape[: draw.randrange(len(session.tape) // 2, len(session.tape))])
            session.ensure_prefix([*kept, *(draw.randrange(1024) for _ in range(160))])
        else:
            session.prefill_suffix([draw.randrange(1024) for _ in range(draw.randrange(8, 120))])
        room = CONFIG.n_ctx - session.resident.n_tokens
        if draw.random() < 0.2 and room > BLOCK and (cold := session.cold_block_ids):
            session.admit(cold[-1])
        session.decode(draw.randrange(16, 200), choose=lambda _: draw.randrange(1024), stop_tokens=frozenset())
    session.close()
    return held


def _write(held: ListSink, recorder: Recorder) -> None:
    for row in held.sessions:
        recorder.open_session(row)
    plans = {plan.seq: plan for plan in held.plans}
    blocks: dict[int, list[BlockRow]] = {}
    for block in held.blocks:
        blocks.setdefault(block.seq, []).append(block)
    for event in held.events:
        recorder.record(
            event,
            tokens=held.tokens.get(event.seq),
            plan=plans.get(event.seq),
            blocks=blocks.get(event.seq, []),
        )
