"""How fast a log takes events: one JSON line per figure.

    python benchmarks/bench_append.py [--events N] [--batch N] [--folder DIR]

append_*    LogWriter.append: Arrow tables in, every batch hashed, committed, sidecar replaced, triggers on
recorder    Recorder end to end: Event objects in, until the last flush returns
record_*    what one record() call costs its caller while the writer keeps up
insert      one INSERT statement per event, each its own transaction, into the same tables (for comparison)
fsync       what one fsync costs in that folder: a batch needs four
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvtape.planner.events import Event, Op
from kvtape.planner.rows import RunRow, SessionRow
from kvtape.traces.codec import to_arrow
from kvtape.traces.recorder import Recorder
from kvtape.traces.schema import EVENTS, quoted
from kvtape.traces.verify import verify
from kvtape.traces.writer import LogWriter

KEY = bytes(32)
RUN = RunRow(
    run_id="bench",
    kind="live",
    config_digest="0" * 64,
    config="{}",
    kvtape_version="0.1.0",
    engine_versions="{}",
    started_at_ns=0,
)
SESSION = SessionRow(
    run_id="bench",
    session_id="session-1",
    backend="llama",
    engine_version="1",
    model_fingerprint="llama/0",
    model_name="model.gguf",
    policy="none",
    n_ctx_asked=4096,
    n_ctx=4096,
    chunk=512,
    kv_type_k="f16",
    kv_type_v="f16",
    flash_attention=False,
    threads=1,
    cold_budget_tokens=0,
    capabilities="{}",
    content=True,
)


class Clock:
    def now_ns(self) -> int:
        return time.perf_counter_ns()


def decode_event(seq: int) -> Event:
    """A decode event as a session writes it: 18 of the columns have a value."""
    return Event(
        run_id=RUN.run_id,
        session_id=SESSION.session_id,
        seq=seq,
        at_ns=1_000_000_000 + seq * 1_000_003,
        op=Op.DECODE,
        turn=1 + seq // 100,
        generation=0,
        start=seq,
        stop=seq + 1,
        n_tokens=1,
        cache_start=seq,
        elapsed_ns=900_000 + seq % 977,
        resident_tokens=seq % 4096,
        resident_digest=(seq * 0x9E3779B97F4A7C15) % 2**64,
        layout_digest=(seq * 0xC2B2AE3D27D4EB4F) % 2**64,
        kv_bytes=(seq % 4096) * 23040,
        completion_tokens=1,
        token_count_source="engine",
        decode_calls=1,
    )


def report(figure: str, value: float, unit: str, **more: object) -> None:
    print(json.dumps({"figure": figure, "value": round(value, 3), "unit": unit} | more, sort_keys=True), flush=True)


def timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def bench_append(folder: Path, events: list[Event], batch: int) -> None:
    tables = [to_arrow(EVENTS, events[i : i + batch]) for i in range(0, len(events), batch)]
    writer = LogWriter.create(folder / f"append{batch}.duckdb", RUN, KEY)
    seconds = [timed(lambda t=t: writer.append({EVENTS.name: t})) for t in tables]  # type: ignore[misc]
    writer.close()
    assert verify(writer.path).ok
    report(f"append_{batch}", len(events) / sum(seconds), "events/s", p50_ms=round(statistics.median(seconds) * 1e3, 2))


def bench_recorder(folder: Path, events: list[Event], batch: int) -> None:
    recorder = Recorder(folder / "recorder.duckdb", RUN, clock=Clock(), batch_events=batch, key=KEY)
    recorder.open_session(SESSION)

    def run() -> None:
        for event in events:
            recorder.record(event, tokens=(7,))
        assert recorder.flush() == len(events)

    seconds = timed(run)
    recorder.close()
    assert verify(recorder.path).ok
    report("recorder", len(events) / seconds, "events/s", batch=batch)


def bench_record_calls(folder: Path, events: list[Event], pause_s: float) -> None:
    """Calls come as from a decode loop, with a pause in which the writer works."""
    recorder = Recorder(folder / "calls.duckdb", RUN, clock=Clock(), key=KEY)
    recorder.open_session(SESSION)
    costs = []
    for event in events:
        began = time.perf_counter_ns()
        recorder.record(event, tokens=(7,))
        costs.append(time.perf_counter_ns() - began)
        time.sleep(pause_s)
    recorder.close()
    costs.sort()
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        report(f"record_{name}", costs[int(len(costs) * share)] / 1e3, "us", calls=len(costs), pause_us=pause_s * 1e6)


def bench_insert(folder: Path, events: list[Event]) -> None:
    writer = LogWriter.create(folder / "insert.duckdb", RUN, KEY)
    names = [*EVENTS.columns, "batch"]
    statement = f"INSERT INTO events ({', '.join(map(quoted, names))}) VALUES ({', '.join('?' for _ in names)})"
    rows = [[getattr(e, c) for c in EVENTS.columns] + [1] for e in events]
    seconds = timed(lambda: [writer.connection.execute(statement, row) for row in rows])
    writer.close()
    report("insert", len(events) / seconds, "events/s")


def bench_fsync(folder: Path) -> None:
    with (folder / "fsync").open("wb") as handle:

        def once() -> None:
            handle.write(b"x" * 4096)
            handle.flush()
            os.fsync(handle.fileno())

        report("fsync", statistics.median(timed(once) for _ in range(30)) * 1e3, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=1_000)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        events = [decode_event(seq) for seq in range(options.events)]
        bench_fsync(folder)
        bench_append(folder, events, options.batch)
        bench_append(folder, events, options.batch * 10)
        bench_recorder(folder, events, options.batch)
        bench_record_calls(folder, events[:3_000], 200e-6)
        bench_insert(folder, events[: max(1, options.events // 200)])


if __name__ == "__main__":
    main()
