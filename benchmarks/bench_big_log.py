"""A log of millions of events: how fast it is verified, how fast one session is read, how large it is.

    python benchmarks/bench_big_log.py [--events N] [--session-events N] [--batch N] [--group N] [--folder DIR]

One JSON line per figure. Exits 1 when a promise of docs/log-figures.md is missed (checked from ten million events on).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from bench_append import KEY, RUN, SESSION

from kvtape.planner.events import SCHEMA_VERSION, Op
from kvtape.traces.codec import to_arrow
from kvtape.traces.reader import open_log
from kvtape.traces.schema import EVENTS, RUNS, arrow_schema
from kvtape.traces.seal import seal_log
from kvtape.traces.verify import verify
from kvtape.traces.writer import LogWriter

FULL = 10_000_000
LIMITS = {"verify": 10.0, "timeline": 0.3, "size": 25.0}


def decode_batch(first: int, n: int, session_events: int) -> pa.Table:
    """Events `first` to `first + n` of the run as columns: decode runs of 32 tokens, as a session writes them."""
    at = np.arange(first, first + n, dtype=np.uint64)
    seq = at % np.uint64(session_events)
    mixed = at * np.uint64(0x9E3779B97F4A7C15)
    resident = np.minimum(seq * np.uint64(32), np.uint64(4064)) + np.uint64(32)
    values: dict[str, pa.Array] = {
        "run_id": constant(RUN.run_id, n),
        "session_id": pa.array([f"session-{i}" for i in (at // np.uint64(session_events)).tolist()]),
        "seq": pa.array(seq),
        "at_ns": pa.array(np.uint64(1_700_000_000_000_000_000) + at * np.uint64(1_000_003)),
        "op": constant(str(Op.DECODE), n),
        "turn": pa.array(seq // np.uint64(100) + np.uint64(1)),
        "generation": constant(0, n, pa.uint64()),
        "start": pa.array(seq * np.uint64(32)),
        "stop": pa.array(seq * np.uint64(32) + np.uint64(32)),
        "n_tokens": constant(32, n, pa.uint64()),
        "cache_start": pa.array(resident - np.uint64(32)),
        "elapsed_ns": pa.array(np.uint64(28_000_000) + mixed % np.uint64(4_000_000)),
        "resident_tokens": pa.array(resident),
        "resident_digest": pa.array(mixed ^ (mixed >> np.uint64(31))),
        "layout_digest": pa.array((mixed * np.uint64(0xC2B2AE3D27D4EB4F)) ^ at),
        "kv_bytes": pa.array(resident * np.uint64(23_040)),
        "completion_tokens": constant(32, n, pa.uint64()),
        "token_count_source": constant("engine", n),
        "decode_calls": constant(32, n, pa.uint64()),
        "schema_version": constant(SCHEMA_VERSION, n, pa.uint64()),
    }
    schema = arrow_schema(EVENTS)
    columns = [values[f.name] if f.name in values else pa.nulls(n, f.type) for f in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def constant(value: object, n: int, kind: pa.DataType | None = None) -> pa.Array:
    return pa.repeat(pa.scalar(value, kind), n)


def batches(n_events: int, batch: int, session_events: int) -> Iterator[pa.Table]:
    for first in range(0, n_events, batch):
        yield decode_batch(first, min(batch, n_events - first), session_events)


def best_of(n: int, action: Callable[[], object]) -> float:
    found = []
    for _ in range(n):
        began = time.perf_counter()
        action()
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=FULL)
    parser.add_argument("--session-events", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--group", type=int, default=16, help="batches to a transaction")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    missed = []

    def report(figure: str, value: float, unit: str, **more: object) -> None:
        line = {"figure": figure, "value": round(value, 3), "unit": unit, "events": options.events} | more
        print(json.dumps(line, sort_keys=True), flush=True)
        if options.events >= FULL and value > LIMITS.get(figure, value):
            missed.append(figure)

    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        path = Path(name) / "big.duckdb"
        writer = LogWriter.create(path, RUN, KEY)
        n_sessions = -(-options.events // options.session_events)
        writer.append({RUNS.name: to_arrow(RUNS, [RUN])})
        writer.append(
            {"sessions": session_rows(n_sessions)},
        )
        appending = 0.0
        tables = batches(options.events, options.batch, options.session_events)
        while group := [{EVENTS.name: table} for table in itertools.islice(tables, options.group)]:
            began = time.perf_counter()
            writer.append_group(group)
            appending += time.perf_counter() - began
        report("append", options.events / appending, "events/s", batch=options.batch, group=options.group)
        report("seal", best_of(1, lambda: seal_log(writer)), "s")
        report("size", path.stat().st_size / 1e6 / (options.events / 1e6), "MB per million events")
        began, cpu = time.perf_counter(), time.process_time()
        result = verify(path)
        assert result.ok, result.findings[:3]
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        report("verify", seconds, "s", batches=result.batches, cpu_s=round(cpu, 2))
        wanted = f"session-{n_sessions // 2}"
        with open_log(path) as log:
            query = "SELECT seq, op, start, stop, resident_tokens FROM events WHERE session_id = ? ORDER BY seq"
            rows = log.connection.execute(query, [wanted]).fetchall()
            assert [r[0] for r in rows] == list(range(len(rows)))
            report(
                "timeline",
                best_of(5, lambda: log.connection.execute(query, [wanted]).fetchall()),
                "s",
                rows=len(rows),
                what="seq, op, range and resident tokens of one session, by SQL",
            )
            report(
                "timeline_events",
                best_of(3, lambda: log.events(RUN.run_id, wanted)),
                "s",
                rows=len(rows),
                what="the same session as typed events with every column",
            )
    return 1 if missed else 0


def session_rows(n: int) -> pa.Table:
    from dataclasses import replace

    from kvtape.traces.schema import SESSIONS

    return to_arrow(SESSIONS, [replace(SESSION, session_id=f"session-{i}") for i in range(n)])


if __name__ == "__main__":
    sys.exit(main())
