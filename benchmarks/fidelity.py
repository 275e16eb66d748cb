"""Does the simulator agree with this machine? `make fidelity` records, calibrates, predicts and compares, in one run.

On each engine: record A and calibrate on it; record B and C twice each, with other texts; simulate both with A's costs.
The table has the errors of operations, turns and totals, beside the machine's own difference between two recordings.
Prints it as Markdown and writes fidelity.json; exit 1 where the bar is missed.

`--clock cpu` (the default) records processor time of this process: the engines run one thread, so on a quiet machine
it is the time that passes, and on a busy one it is what the work cost without the waiting for others. `--clock wall`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.protocol import Clock, Engine, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.backends.session import Session
from kvtape.cli.models import demo_model, trained_context
from kvtape.cli.prompts import Message, chat_script
from kvtape.cli.recording import live_run
from kvtape.planner.specs import parse_policy
from kvtape.sim.costs.calibrate import calibrate
from kvtape.sim.costs.model import CostTable
from kvtape.sim.fidelity import Comparison, compare
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import simulate
from kvtape.sim.world.settings import Settings
from kvtape.testing.sink import ListSink
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder


@dataclass(frozen=True)
class Case:
    """A chat about `paragraphs` of the demo's essay, `decode` tokens each turn; `session` names it in its log."""

    session: str
    paragraphs: tuple[int, int]
    policy: str
    n_ctx: int
    chunk: int
    decode: int


LEARNT = (
    Case("A-stream", (0, 5), "stream:sink=4,recent=300", 512, 128, 32),
    Case("A-class", (5, 9), "class:budget=400", 512, 64, 20),
)
PREDICTED = (
    Case("B", (10, 15), "stream:sink=4,recent=300", 512, 128, 32),
    Case("C", (15, 19), "class:budget=380", 768, 96, 24),
)
ENGINES = ("llama", "openvino")


class ProcessorClock:
    """Processor time of this process, all threads."""

    def now_ns(self) -> int:
        return time.process_time_ns()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("fidelity.json"))
    parser.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    asked = parser.parse_args()
    clock = ProcessorClock() if asked.clock == "cpu" else MonotonicClock()
    with tempfile.TemporaryDirectory() as scratch:
        results = {name: _engine(Path(scratch), name, clock) for name in ENGINES}
    asked.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(_table(results))
    return 0 if all(case["holds"] for cases in results.values() for case in cases.values()) else 1


def _engine(folder: Path, name: str, clock: Clock) -> dict[str, Any]:
    engine = open_engine(name, demo_model(), {})
    try:
        # The recordings take turns, so that a load that comes and goes falls on all of them.
        learnt = _record(folder / f"{name}-A.duckdb", engine, LEARNT, clock)
        logs = {(case.session, n): folder / f"{name}-{case.session}{n}.duckdb" for n in (1, 2) for case in PREDICTED}
        for (session, _), log in logs.items():
            _record(log, engine, [c for c in PREDICTED if c.session == session], clock)
    finally:
        engine.close()
    with open_log(learnt) as tape:
        costs = calibrate([tape], machine=None, kvtape_version="bench")
    return {c.session: _predict([logs[c.session, n] for n in (1, 2)], c.session, costs).to_json() for c in PREDICTED}


def _record(log: Path, engine: Engine, cases: Sequence[Case], clock: Clock) -> Path:
    print(f"recording {log.name}", file=sys.stderr, flush=True)
    essay = files("kvtape.cli").joinpath("text", "essay.txt").read_text(encoding="utf-8")
    paragraphs = [p.strip() for p in essay.split("\n\n") if len(p.strip()) > 80]
    run = live_run({"bench": "fidelity", "log": log.name}, engine, clock)
    with Recorder(log, run, clock=clock) as recorder:
        for case in cases:
            config = SessionConfig(n_ctx=case.n_ctx, chunk=case.chunk, threads=1)
            messages = [Message("user", p[:900]) for p in paragraphs[slice(*case.paragraphs)]]
            backend, policy = engine.open(config), parse_policy(case.policy)
            names = {"run_id": run.run_id, "session_id": case.session}
            with Session(backend, policy, recorder, clock, content=True, **names) as session:
                chat_script(engine, messages, case.decode).play(session)
    return log


def _predict(logs: Sequence[Path], session: str, costs: CostTable) -> Comparison:
    sink = ListSink()
    with open_log(logs[0]) as one, open_log(logs[1]) as two:
        trained = trained_context(demo_model())
        simulate(read_scripts(one), Settings(arrivals="closed"), costs, sinks=[sink], n_ctx_train=trained)
        recorded = [tape.events(tape.default_run().run_id, session) for tape in (one, two)]
    return compare(recorded[0], recorded[1], sink.events)


def _table(results: dict[str, Any]) -> str:
    columns = "engine | log | what | n | model median | model p95 | machine median | machine p95"
    head = f"| {columns} |\n|---|---|---|--:|--:|--:|--:|--:|"
    lines = [head]
    for engine, cases in results.items():
        for name, case in cases.items():
            rows = [*case["operation"].items(), ("turn", case["turn"]), ("total", case["total"])]
            for what, pair in rows:
                figures = [pair[who][key] for who in ("model", "machine") for key in ("median", "p95")]
                cells = " | ".join(f"{100 * f:.1f} %" for f in figures)
                lines.append(f"| {engine} | {name} | {what} | {pair['machine']['n']} | {cells} |")
            verdict = "holds" if case["holds"] else "does not hold"
            same = case["difference"] or f"equal at all {case['residency_events']} events"
            allowed = f"turn error <= {100 * case['allowed']:.1f} %: {verdict}"
            lines.append(f"| {engine} | {name} | retained sets {same}; {allowed} | | | | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
