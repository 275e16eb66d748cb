"""`kvtape demo`: the whole tool on a real model in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AnyModelPath, AsJson, Threads

if TYPE_CHECKING:
    from kvtape.backends.protocol import Engine
    from kvtape.cli.demo_script import Material, SessionPlan
    from kvtape.cli.output import Section
    from kvtape.traces.reader import Log
    from kvtape.traces.recorder import Recorder

__all__ = ["QUESTIONS", "REPLAY_ON", "demo"]

REPLAY_ON = ("llama", "openvino", "openvino:way=recompute")
QUESTION = "\n\nQuestion: what did Odile keep on her desk?\nAnswer:"
MEANT = "\n\nQuestion: what is the witness, the plan, the ledger or the book?\nAnswer:"

_RESULTS = ("replay.json", "answers.json", "costs.json", "whatif.json")

QUESTIONS: dict[str, str] = {
    "Why was each prompt prefilled?": (
        "SELECT session_id AS session, turn, reason, count(*) AS prefills, sum(tokens) AS tokens FROM why_prefilled "
        "GROUP BY ALL ORDER BY session, turn, min(seq)"
    ),
    "What did each operation cost?": (
        "SELECT op, way, events, tokens, round(ns_per_token / 1e6, 3) AS ms_per_token FROM costs "
        "WHERE op <> 'plan' ORDER BY op, way"
    ),
    "What did each plan keep, and what did it cost to carry out?": (
        "SELECT session_id AS session, seq, turn, total_tokens AS before, hot_tokens AS kept, evicts, "
        "round(evict_ns / 1e6, 1) AS evict_ms FROM decisions ORDER BY session_id, seq"
    ),
}
"""The three questions whose answers the demo prints."""


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where everything is written.")] = Path("demo-out"),
    model: AnyModelPath = None,
    threads: Threads = 2,
    as_json: AsJson = False,
) -> int:
    """Record a session, replay it on both engines, ask three questions, try six policies and budgets.

    Writes the log with its head and key, replay.json, answers.json, costs.json and whatif.json to DIR; an
    earlier demo there is replaced. Exits 1 when the engines, or the simulation and the record, disagree.
    """
    from kvtape.cli.demo_whatif import demo_whatif, demo_whatif_sections
    from kvtape.cli.logs import opened
    from kvtape.cli.models import demo_model, trained_context
    from kvtape.cli.output import Section, emit, note
    from kvtape.cli.replay import replay_log, replay_sections

    path = model if model is not None else demo_model()
    _require_engines()
    log = _fresh(out)
    note(f"1/4 recording two sessions of {path.name} on llama.cpp into {log}")
    answer = _record(log, path, threads)
    with opened(log) as tape:
        note(f"2/4 replaying on {', '.join(REPLAY_ON)}, and asking each engine's memory what it holds")
        report = replay_log(tape, list(REPLAY_ON), path).to_json()
        note("3/4 asking the log")
        answers = {question: _ask(tape, query) for question, query in QUESTIONS.items()}
        note("4/4 learning from it what operations cost, and simulating other policies and budgets")
        costs, tried = demo_whatif(tape, trained_context(path))
        digest = tape.logical_digest(tape.default_run().run_id)
        events = tape.sql("SELECT count(*) FROM events")[1][0][0]
    _write(out / "replay.json", report)
    _write(out / "answers.json", answers)
    _write(out / "costs.json", costs)
    _write(out / "whatif.json", tried)
    sections: list[Section] = [*replay_sections(report)]
    sections += [Section(q, tuple(a["columns"]), [tuple(row) for row in a["rows"]]) for q, a in answers.items()]
    sections += demo_whatif_sections(tried)
    sections.append(Section(f"the model, asked what the witness is: {_first_line(answer)}", (), ()))
    sections.append(Section(f"{events} events in {log}; look around with: kvtape show {log}", (), ()))
    body = {"log": str(log), "events": events, "answer": answer, "replay": report, "answers": answers}
    body |= {"whatif": tried}
    emit("demo", body, sections, as_json=as_json, digest=digest, digest_kind="logical")
    return 0 if report["equal"] and tried["recorded"]["equal"] else 1


def _require_engines() -> None:
    """Raises EnvironmentProblem before anything is recorded when an engine of the replay is not installed."""
    from importlib.util import find_spec

    from kvtape.backends.errors import EnvironmentProblem
    from kvtape.cli.doctor import ENGINES
    from kvtape.cli.errors import missing_extra

    for module, _ in ENGINES.values():
        if find_spec(module) is None:
            raise EnvironmentProblem(missing_extra(module))


def _fresh(out: Path) -> Path:
    """The path of the log in an existing folder, with what an earlier demo left there removed."""
    from kvtape.backends.errors import UsageError

    try:
        out.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UsageError(f"{out}: is a file; name a folder with --out") from None
    for old in (*out.glob("demo.duckdb*"), *(out / name for name in _RESULTS)):
        old.unlink(missing_ok=True)
    return out / "demo.duckdb"


def _record(log: Path, model: Path, threads: int) -> str:
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


def _ask(tape: Log, query: str) -> dict[str, Any]:
    from kvtape.cli.sql import jsonable

    columns, rows = tape.sql(query)
    return {"query": query, "columns": list(columns), "rows": [[jsonable(v) for v in row] for row in rows]}


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")


def _write(path: Path, value: Any) -> None:
    import json

    from kvtape.cli.files import write_whole

    write_whole(path, json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False) + "\n")
