"""What the demo records: two sessions of a real model, on llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtape.backends.protocol import Engine, EventSink, SessionConfig
    from kvtape.cli.demo_script import Material, SessionPlan
    from kvtape.traces.recorder import Recorder

__all__ = ["record_demo"]

QUESTION = "\n\nQuestion: what did Odile keep on her desk?\nAnswer:"
MEANT = "\n\nQuestion: what is the witness, the plan, the ledger or the book?\nAnswer:"


def record_demo(log: Path, model: Path, threads: int, kv_type: str | None = None) -> str:
    """Record both sessions into a new log; the model's last answer. `threads`: of the engine; `kv_type`: K[/V].

    Raises UsageError for a storage type that is none, or that nothing certifies here.
    """
    from kvtape.backends.clock import MonotonicClock
    from kvtape.backends.registry import open_engine
    from kvtape.cli.demo_script import ESSAY, NOTES
    from kvtape.cli.precision import as_asked
    from kvtape.cli.recording import live_run, recording

    base = _base(threads, kv_type)
    engine = open_engine("llama", model, {})
    try:
        material = _material(engine)
        clock = MonotonicClock()
        plans = [ESSAY.policy, NOTES.policy]
        asked = {"verb": "demo", "policies": plans, "model": engine.facts.fingerprint}
        asked |= as_asked(kv_type, None, uncertified=False)
        run = live_run(asked, engine, clock)
        with recording(log, run, clock) as recorder:
            said = _sessions(engine, material, recorder, run.run_id, base)
        return engine.detokenize(said)
    finally:
        engine.close()


def _base(threads: int, kv_type: str | None) -> SessionConfig:
    """What both sessions open with, but for their sizes."""
    from kvtape.backends.protocol import SessionConfig
    from kvtape.cli.demo_script import CHUNK
    from kvtape.cli.precision import with_precision

    return with_precision("llama", SessionConfig(chunk=CHUNK, threads=threads), kv_type, None, uncertified=False)


def _material(engine: Engine) -> Material:
    from kvtape.cli.demo_script import Material
    from kvtape.cli.engine_text import essay

    return Material(essay=engine.tokenize(essay()), question=engine.tokenize(QUESTION), meant=engine.tokenize(MEANT))


def _sessions(
    engine: Engine, material: Material, recorder: Recorder, run_id: str, base: SessionConfig
) -> tuple[int, ...]:
    from kvtape.cli.demo_script import ESSAY, NOTES, play_essay, play_notes
    from kvtape.cli.output import note
    from kvtape.cli.progress import WatchedSink, progress

    def tell(text: str) -> None:
        note(f"    {text}")

    with progress("the essay") as shown:
        sink = WatchedSink(recorder, shown, len(material.essay))
        essay, _ = _open(engine, ESSAY, sink, run_id, base)
        with essay:
            said = play_essay(essay, material, tell)
    notes, backend = _open(engine, NOTES, recorder, run_id, base, dense=True)
    with notes:
        fatal = play_notes(notes, material, backend.abort_next, tell)
    tell(f"it says so on every later call: {fatal}")
    return said


def _open(
    engine: Engine, plan: SessionPlan, recorder: EventSink, run_id: str, base: SessionConfig, *, dense: bool = False
) -> tuple[Any, Any]:
    """The session and its backend; with `dense` what every token attends to is measured beside it."""
    from dataclasses import replace

    from kvtape.backends.clock import MonotonicClock, StoppableClock
    from kvtape.backends.session import Session
    from kvtape.backends.shadow import open_shadow
    from kvtape.planner.specs import parse_policy

    config = replace(base, n_ctx=plan.n_ctx, cold_budget_tokens=plan.cold_budget_tokens)
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
