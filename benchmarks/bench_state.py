"""How long one session's state takes to read from a sealed log. One JSON line per kind of log.

    python benchmarks/bench_state.py [--events N] [--folder DIR]

seconds      `Log.state_at`: columns from the log's tables, folded as columns; best of three
cpu_s        its processor time, DuckDB's threads included
one_by_one   processor time of every event as an object, folded one after the other: the same state in the end

The kinds are those of bench_fold.py.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from bench_append import KEY, RUN, SESSION
from bench_fold import Log as Made
from bench_fold import chat, decoding, made, streaming

from kvtape.planner.residency import fold
from kvtape.traces.codec import to_arrow
from kvtape.traces.reader import open_log
from kvtape.traces.schema import EVENTS, RUNS, SESSIONS
from kvtape.traces.seal import seal_log
from kvtape.traces.writer import LogWriter

BATCH = 1_000


def sealed(path: Path, step: Callable[[Made], None], n: int) -> int:
    """A sealed log of one session; how many events it has."""
    events = [replace(e, run_id=RUN.run_id, session_id=SESSION.session_id) for e in made(step, n)]
    writer = LogWriter.create(path, RUN, KEY)
    writer.append({RUNS.name: to_arrow(RUNS, [RUN]), SESSIONS.name: to_arrow(SESSIONS, [SESSION])})
    for at in range(0, len(events), 16 * BATCH):
        part = events[at : at + 16 * BATCH]
        writer.append_group([{EVENTS.name: to_arrow(EVENTS, part[i : i + BATCH])} for i in range(0, len(part), BATCH)])
    seal_log(writer)
    writer.close()
    return len(events)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=50_000)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        for step in (decoding, chat, streaming):
            path = Path(name) / f"{step.__name__}.duckdb"
            n = sealed(path, step, options.events)
            with open_log(path) as log:
                walls, cpus = [], []
                for _ in range(3):
                    wall, cpu = time.perf_counter(), time.process_time()
                    state = log.state_at(RUN.run_id, SESSION.session_id)
                    walls.append(time.perf_counter() - wall)
                    cpus.append(time.process_time() - cpu)
                cpu = time.process_time()
                assert fold(log.events(RUN.run_id, SESSION.session_id)) == state
                cpu = time.process_time() - cpu
            figures = {"cpu_s": round(min(cpus), 3), "one_by_one": round(cpu, 2), "seconds": round(min(walls), 3)}
            print(json.dumps({"benchmark": "state", "events": n, "log": step.__name__} | figures), flush=True)


if __name__ == "__main__":
    main()
