"""Does the simulator agree with this machine? `make fidelity` records, calibrates, predicts and compares, in one run.

On each engine: record A and calibrate on it; record the logs of `fidelity_cases.PREDICTED` twice, with other texts;
simulate them with A's costs. The table has the errors of operations, turns and totals, beside the machine's own
difference between two recordings. Prints it as Markdown and writes fidelity.json, which kvtape report --with shows;
exit 1 where the bar is missed.

The third subject are the modelled operations: a machine that takes exactly what llama.cpp's costs say does the same
work, is calibrated on what it did on A, and predicted. What is wrong there is wrong with the calibration itself.

`--clock cpu` (the default) records processor time of this process: the engines run one thread, so on a quiet machine
it is the time that passes, and on a busy one it is what the work cost without the waiting for others. `--clock wall`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fidelity_cases import LEARNT, PREDICTED, record

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.protocol import Clock
from kvtape.backends.registry import open_engine
from kvtape.cli.models import demo_model, trained_context
from kvtape.cli.recording import live_run
from kvtape.planner.events import Event
from kvtape.sim.costs.calibrate import calibrate, calibrate_samples
from kvtape.sim.costs.model import CostTable
from kvtape.sim.costs.samples import samples_of
from kvtape.sim.fidelity import Comparison, compare
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import simulate
from kvtape.sim.world.settings import Settings
from kvtape.testing.sink import ListSink
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder

ENGINES = ("llama", "openvino")
TWICE = (1, 2)
SCHEMA = "kvtape.fidelity/1"  # what kvtape report --with knows it by

Sessions = Mapping[str, Sequence[Event]]


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
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for engine in ENGINES:
            _record(folder, engine, clock)
        learnt = {engine: _learnt(folder / f"{engine}-A.duckdb") for engine in ENGINES}
        for engine, costs in learnt.items():
            results[engine] = _json(_predicted(folder, engine, costs))
        results["modelled"] = _json(_modelled(folder, "llama", learnt["llama"]))
    said = {"schema": SCHEMA, "kvtape_version": version("kvtape"), "clock": asked.clock, "engines": results}
    asked.out.write_text(json.dumps(said, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(_table(results))
    return 0 if all(case["holds"] for cases in results.values() for case in cases.values()) else 1


def _record(folder: Path, name: str, clock: Clock) -> None:
    """A's sessions are spread over the recordings of the others: a load that comes and goes falls on all of them."""
    others = [(f"{case.session}{n}", case) for n in TWICE for case in PREDICTED]
    order = [(i / len(others), log, case) for i, (log, case) in enumerate(others)]
    order += [((i + 0.5) / len(LEARNT), "A", case) for i, case in enumerate(LEARNT)]
    engine = open_engine(name, demo_model(), {})
    try:
        with ExitStack() as held:
            logs: dict[str, Recorder] = {}
            for log in ("A", *(log for log, _ in others)):
                run = live_run({"bench": "fidelity", "engine": name, "log": log}, engine, clock)
                logs[log] = held.enter_context(Recorder(folder / f"{name}-{log}.duckdb", run, clock=clock))
            for _, log, case in sorted(order, key=lambda one: one[:2]):
                record(logs[log], engine, case, clock)
    finally:
        engine.close()


def _learnt(log: Path) -> CostTable:
    with open_log(log) as tape:
        return calibrate([tape], machine=None, kvtape_version="bench")


def _predicted(folder: Path, engine: str, costs: CostTable) -> dict[str, Comparison]:
    found = {}
    for case in PREDICTED:
        logs = [folder / f"{engine}-{case.session}{n}.duckdb" for n in TWICE]
        one, two = (_recorded(log)[case.session] for log in logs)
        found[case.session] = compare(one, two, _simulated(logs[0], costs)[case.session])
    return found


def _modelled(folder: Path, engine: str, truth: CostTable) -> dict[str, Comparison]:
    """What a machine of `truth` does of the engine's logs, beside what is predicted of it."""
    did = _simulated(folder / f"{engine}-A.duckdb", truth)
    learnt = calibrate_samples([sample for events in did.values() for sample in samples_of(events)])
    costs = CostTable(truth.origin, learnt)
    found = {}
    for case in PREDICTED:
        log = folder / f"{engine}-{case.session}1.duckdb"
        one, two, simulated = (_simulated(log, table)[case.session] for table in (truth, truth, costs))
        found[case.session] = compare(one, two, simulated)
    return found


def _recorded(log: Path) -> Sessions:
    with open_log(log) as tape:
        run = tape.default_run().run_id
        return {row.session_id: tape.events(run, row.session_id) for row in tape.sessions(run)}


def _simulated(log: Path, costs: CostTable) -> Sessions:
    sink = ListSink()
    with open_log(log) as tape:
        trained = trained_context(demo_model())
        simulate(read_scripts(tape), Settings(arrivals="closed"), costs, sinks=[sink], n_ctx_train=trained)
    found: dict[str, list[Event]] = {}
    for event in sink.events:
        found.setdefault(event.session_id, []).append(event)
    return found


def _json(cases: Mapping[str, Comparison]) -> dict[str, Any]:
    return {name: case.to_json() for name, case in cases.items()}


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
