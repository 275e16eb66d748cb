"""Does the simulator agree with this machine? `make fidelity` records, calibrates, predicts and compares, in one run.

On each engine: calibrate on log A; record B and C twice each, with other texts, and C with another policy, context
and chunk; simulate both with A's costs. The table has the errors of operations, turns and totals, beside the
machine's own difference between the two recordings. Writes fidelity.json and prints the table as Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvtape.sim.costs.calibrate import calibrate
from kvtape.sim.costs.model import CostTable
from kvtape.sim.fidelity import Comparison, compare
from kvtape.sim.world.reading import read_scripts
from kvtape.sim.world.running import simulate
from kvtape.sim.world.settings import Settings
from kvtape.testing.sink import ListSink
from kvtape.traces.reader import open_log


@dataclass(frozen=True)
class Case:
    """A chat of `paragraphs` of the demo's essay, and how it is recorded."""

    name: str
    paragraphs: tuple[int, int]
    options: tuple[str, ...]


_LIKE_A = ("--policy", "stream:sink=4,recent=300", "--n-ctx", "512", "--chunk", "128", "--decode", "32")
LEARNT = Case("A", (0, 10), _LIKE_A)
PREDICTED = (
    Case("B", (10, 18), _LIKE_A),
    Case("C", (4, 12), ("--policy", "class:budget=380", "--n-ctx", "768", "--chunk", "96", "--decode", "24")),
)
ENGINES = ("llama", "openvino")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("fidelity.json"))
    parser.add_argument("--keep", type=Path, help="keep the logs in this folder")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        results = {engine: _engine(folder, engine) for engine in ENGINES}
    asked.out.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(_table(results))
    return 0 if all(case["holds"] for cases in results.values() for case in cases.values()) else 1


def _engine(folder: Path, engine: str) -> dict[str, Any]:
    # The recordings take turns, so that a load that comes and goes falls on all of them.
    first = _record(folder, engine, LEARNT, 1)
    pairs = {case.name: [_record(folder, engine, case, 1)] for case in PREDICTED}
    for case in PREDICTED:
        pairs[case.name].append(_record(folder, engine, case, 2))
    with open_log(first) as tape:
        costs = calibrate([tape], machine=None, kvtape_version="bench")
    return {case.name: _predict(pairs[case.name], costs).to_json() for case in PREDICTED}


def _record(folder: Path, engine: str, case: Case, again: int) -> Path:
    log = folder / f"{engine}-{case.name}{again}.duckdb"
    if log.exists():
        return log
    essay = files("kvtape.cli").joinpath("text", "essay.txt").read_text(encoding="utf-8")
    paragraphs = [p.strip() for p in essay.split("\n\n") if len(p.strip()) > 80]
    chat = folder / f"{case.name}.jsonl"
    lines = [{"role": "user", "content": p[:900]} for p in paragraphs[slice(*case.paragraphs)]]
    chat.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    command = [sys.executable, "-m", "kvtape.cli", "record", "--chat", str(chat), "--backend", engine]
    print(f"recording {log.name}", file=sys.stderr, flush=True)
    subprocess.run([*command, *case.options, "--content", "--log", str(log)], check=True, stdout=subprocess.DEVNULL)
    return log


def _predict(logs: list[Path], costs: CostTable) -> Comparison:
    sink = ListSink()
    with open_log(logs[0]) as one, open_log(logs[1]) as two:
        scripts = read_scripts(one)
        simulate(scripts, Settings(arrivals="closed"), costs, sinks=[sink])
        recorded = [tape.events(tape.default_run().run_id, "main") for tape in (one, two)]
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
