"""How fast a trace becomes a log, beside the plain way: json.loads for each line and one INSERT for each row.

rows_per_s       requests of a made-up Mooncake trace, from the file to the sealed, verified log
plain_rows_per_s the same into three bare tables without checks, chain, head or seal
factor           the first over the second, of the same run
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import duckdb
import numpy as np

from kvtape.traces.importers.importing import import_trace

N_REQUESTS = 20_000
N_PLAIN = 1_000
"""The plain way is measured on so many: it takes a millisecond a row."""


def write_trace(path: Path, n: int) -> None:
    """Requests of 1 to 24 blocks, the first few shared, as conversations have them."""
    draw = np.random.default_rng(7)
    lengths = draw.integers(1, 12_289, n)
    with path.open("w", encoding="utf-8") as out:
        fresh = 1_000
        for i, length in enumerate(lengths.tolist()):
            blocks = -(-length // 512)
            shared = int(draw.integers(0, blocks + 1))
            ids = [*range(shared), *range(fresh, fresh + blocks - shared)]
            fresh += blocks - shared
            row = {"timestamp": i // 10 * 3000, "input_length": length, "output_length": 200, "hash_ids": ids}
            out.write(json.dumps(row) + "\n")


def plain(path: Path, log: Path, n: int) -> float:
    """Seconds of the plain way over the first `n` requests."""
    began = time.perf_counter()
    connection = duckdb.connect(str(log))
    connection.execute("CREATE TABLE sessions (session VARCHAR)")
    connection.execute("CREATE TABLE events (session VARCHAR, seq UBIGINT, at_ns UBIGINT, op VARCHAR, n UBIGINT)")
    connection.execute("CREATE TABLE tokens (session VARCHAR, hashes VARCHAR)")
    connection.execute("BEGIN")
    with path.open(encoding="utf-8") as lines:
        for number, line in zip(range(n), lines, strict=False):
            row = json.loads(line)
            name, at_ns = f"line-{number}", row["timestamp"] * 1_000_000
            connection.execute("INSERT INTO sessions VALUES (?)", [name])
            counts = (
                ("open", None),
                ("prompt", row["input_length"]),
                ("generate", row["output_length"]),
                ("close", None),
            )
            for seq, (op, count) in enumerate(counts):
                connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", [name, seq, at_ns, op, count])
            connection.execute("INSERT INTO tokens VALUES (?, ?)", [name, json.dumps(row["hash_ids"])])
    connection.execute("COMMIT")
    connection.close()
    return time.perf_counter() - began


def main() -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = folder / "trace.jsonl"
        write_trace(trace, N_REQUESTS)
        began = time.perf_counter()
        result = import_trace([trace], folder / "log.duckdb", kvtape_version="0")
        seconds = time.perf_counter() - began
        rate, plain_rate = result.rows / seconds, N_PLAIN / plain(trace, folder / "plain.duckdb", N_PLAIN)
    return {
        "rows_per_s": rate,
        "events_per_s": result.events / seconds,
        "plain_rows_per_s": plain_rate,
        "factor": rate / plain_rate,
    }


if __name__ == "__main__":
    json.dump(main(), sys.stdout, indent=1)
    print()
