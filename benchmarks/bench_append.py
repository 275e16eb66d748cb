"""How fast a log takes events: one JSON line per figure.

    python benchmarks/bench_append.py [--events N] [--batch N] [--folder DIR]

append_*    LogWriter.append: Arrow tables in, every batch hashed, committed, sidecar replaced, triggers on
group_*     LogWriter.append_group: the same batches, each a link of the chain, sixteen to a transaction and a sidecar
recorder    Recorder end to end: Event objects in, until the last flush returns
record_*    what one record() call costs its caller while another thread flushes all the time
stalled_*   what is held in memory when the disk stands still, and what becomes of the rest, for both overflow policies
insert      one INSERT statement per event, each its own transaction, into the same tables (for comparison)
fsync       what one fsync costs in that folder: a transaction needs three (write-ahead log, sidecar, folder)

`cpu_us` is the writing thread's processor time an event: what the rate is bound by where the disk is quick, whatever
else the machine does meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import pyarrow as pa

from kvtape.planner.events import Event, Op
from kvtape.planner.rows import RunRow, SessionRow
from kvtape.traces.codec import to_arrow
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.schema import EVENTS, quoted
from kvtape.traces.sidecar import Head
from kvtape.traces.verify import verify
from kvtape.traces.writer import LogWriter

KEY = bytes(32)
OVERFLOW: tuple[Literal["block", "drop"], ...] = ("block", "drop")
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


def bench_append(folder: Path, events: list[Event], batch: int, group: int = 1) -> None:
    batches = [{EVENTS.name: to_arrow(EVENTS, events[i : i + batch])} for i in range(0, len(events), batch)]
    groups = [batches[i : i + group] for i in range(0, len(batches), group)]
    name = f"group_{batch}" if group > 1 else f"append_{batch}"
    writer = LogWriter.create(folder / f"{name}.duckdb", RUN, KEY)
    cpu = time.thread_time()
    seconds = [timed(lambda g=g: writer.append_group(g)) for g in groups]  # type: ignore[misc]
    cpu = time.thread_time() - cpu
    writer.close()
    found = verify(writer.path)
    assert found.ok
    assert found.batches == len(batches)
    report(
        name,
        len(events) / sum(seconds),
        "events/s",
        batches_per_transaction=group,
        cpu_us=round(cpu / len(events) * 1e6, 2),
        p50_ms=round(statistics.median(seconds) * 1e3, 2),
        per_s_of_cpu=round(len(events) / cpu),
    )


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
    """Calls come as from a decode loop, with a pause in between, while another thread flushes all along."""
    recorder = Recorder(folder / "calls.duckdb", RUN, clock=Clock(), key=KEY)
    recorder.open_session(SESSION)
    stop, flushes = threading.Event(), [0]

    def flush_all_along() -> None:
        while not stop.is_set():
            recorder.flush()
            flushes[0] += 1

    flusher = threading.Thread(target=flush_all_along)
    flusher.start()
    costs: list[tuple[int, int]] = []
    for event in events:
        cpu, began = time.thread_time_ns(), time.perf_counter_ns()
        recorder.record(event, tokens=(7,))
        costs.append((time.perf_counter_ns() - began, time.thread_time_ns() - cpu))
        time.sleep(pause_s)
    stop.set()
    flusher.join()
    recorder.close()
    wall, used = (sorted(column) for column in zip(*costs, strict=True))
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        at = int(len(costs) * share)
        facts = {"calls": len(costs), "cpu_us": round(used[at] / 1e3, 1), "flushes": flushes[0]}
        report(f"record_{name}", wall[at] / 1e3, "us", pause_us=pause_s * 1e6, **facts)


def bench_stalled(folder: Path, events: list[Event], overflow: Literal["block", "drop"]) -> None:
    """The disk takes nothing more; events keep coming until all are handed over or the recorder makes them wait."""
    held = 4_096
    recorder = Recorder(
        folder / f"{overflow}.duckdb", RUN, clock=Clock(), key=KEY, queue_events=held, overflow=overflow
    )
    recorder.open_session(SESSION)
    recorder.flush()
    go, handed = threading.Event(), [0]
    write = recorder._writer.append_group

    def stalled(batches: Sequence[Mapping[str, pa.Table]]) -> Head:
        go.wait()
        return write(batches)

    def hand_over() -> None:
        for event in events:
            recorder.record(event, tokens=(7,))
            handed[0] += 1

    recorder._writer.append_group = stalled  # type: ignore[method-assign]
    tracemalloc.start()
    caller = threading.Thread(target=hand_over)
    caller.start()
    before = -1
    while caller.is_alive() and handed[0] > before:  # until it stands still
        before = handed[0]
        caller.join(0.5)
    memory = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    waiting, during = len(recorder._queue), handed[0]
    assert waiting <= held
    go.set()
    caller.join()
    stored = recorder.flush()
    recorder.close()
    with open_log(recorder.path) as log:
        lost = log.sql("SELECT coalesce(sum((detail->>'events')::BIGINT), 0) FROM events WHERE op = 'lost'")[1][0][0]
        n_lost_events = log.sql("SELECT count(*) FROM events WHERE op = 'lost'")[1][0][0]
    assert stored - n_lost_events + lost == len(events)
    assert (lost == 0) == (overflow == "block")
    facts = {"handed_over": during, "kb_held": round(memory / 1e3), "queue_events": held, "lost_and_said": lost}
    report(f"stalled_{overflow}", waiting, "events waiting", **facts)


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
        for group in (1, 16):
            bench_append(folder, events, options.batch, group)
        bench_append(folder, events, options.batch * 10)
        bench_recorder(folder, events, options.batch)
        bench_record_calls(folder, events[:3_000], 200e-6)
        for overflow in OVERFLOW:
            bench_stalled(folder, events[:30_000], overflow)
        bench_insert(folder, events[: max(1, options.events // 200)])


if __name__ == "__main__":
    main()
