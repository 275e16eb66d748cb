"""What the demo records: two sessions of a real model, on llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtape.backends.protocol import Engine
    from kvtape.cli.demo_script import Material, SessionPlan
    from kvtape.traces.recorder import Recorder

__all__ = ["record_demo"]

QUESTION = "\n\nQuestion: what did Odile keep on her desk?\nAnswer:"
MEANT = "\n\nQuestion: what is the witness, the plan, the ledger or the book?\nAnswer:"


def record_demo(log: Path, model: Path, threads: int) -> str:
    """Record both sessions into a new log; the model's last answer. `threads`: of the engine."""
    from kvtape.backends.clock import MonotonicClock
    from kvtape.backends.registry import open_engine
    from kvtape.cli.demo_script import ESSAY, NOTES
    from kvtape.cli.recording import live_run, recording

    engine = open_engine("llama", model, {})
    try:
        material = _material(engine)
        clock = MonotonicClock()
        plans = [ESSAY.policy, NOTES.policy]
        run = live_run({"verb": "demo", "policies": plans, "model": engine.facts.fingerprint}, engine, clock)
        with recording(log, run, clock) as recorder:
            said = _sessions(engine, material, recorder, run.run_id, threads)
        return engine.detokenize(said)
    finally:
        engine.close()


def _material(engine: Engine) -> Material:
    from kvtape.cli.demo_script import Material
    from kvtape.cli.engine_text import essay

    return Material(essay=engine.tokenize(essay()), question=engine.tokenize(QUESTION), meant=engine.tokenize(MEANT))


def _sessions(engine: Engine, material: Material, recorder: Recorder, run_id: str, threads: int) -> tuple[int, ...]:
    from kvtape.cli.demo_script import ESSAY, NOTES, play_essay, play_notes
    from kvtape.cli.output import note

    def tell(text: str) -> None:
        note(f"    {text}")

    essay, _ = _open(engine, ESSAY, recorder, run_id, threads)
    with essay:
        said = play_essay(essay, material, tell)
    notes, backend = _open(engine, NOTES, recorder, run_id, threads, dense=True)
    with notes:
        fatal = play_notes(notes, material, backend.abort_next, tell)
    tell(f"it says so on every later call: {fatal}")
    return said


def _open(
    engine: Engine, plan: SessionPlan, recorder: Recorder, run_id: str, threads: int, *, dense: bool = False
) -> tuple[Any, Any]:
    """The session and its backend; with `dense` what every token attends to is measured beside it."""
    from kvtape.backends.clock import MonotonicClock, StoppableClock
    from kvtape.backends.protocol import SessionConfig
    from kvtape.backends.session import Session
    from kvtape.backends.shadow import open_shadow
    from kvtape.cli.demo_script import CHUNK
    from kvtape.planner.specs import parse_policy

    config = SessionConfig(n_ctx=plan.n_ctx, chunk=CHUNK, threads=threads, cold_budget_tokens=plan.cold_budget_tokens)
    clock = StoppableClock(MonotonicClock())
    shadow = open_shadow(engine, config, clock, tokens=plan.n_ctx) if dense else None
    backend = engine.open(config)
    session = Session(
        backend,
        parse_policy(plan.policy),
        recorder,
        clock,
        run_id=run_id,
        session_id=plan.session_id,
        content=True,
        shadow=shadow,
    )
    return session, backend
