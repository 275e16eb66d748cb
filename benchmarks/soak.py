"""The long run behind the promise that nothing acknowledged is lost: `make soak`. One JSON line per figure.

    python benchmarks/soak.py [--kills N] [--events N] [--limits N] [--flips N] [--seed S] [--folder DIR]

kills    kill -9 of real recorder processes at random moments
states   every state in which a power cut may leave the disk, in five variants, from recorded calls (needs strace)
full     recording until files may not grow past a limit, over many limits
flips    single flipped bits in the database file, the write-ahead log and the sidecar, while recorded and sealed

Exits 1 when anything acknowledged was lost, a batch was there in part, or a flipped bit went unnoticed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.crash_states import survey
from support.disk_calls import record_calls
from support.flips import flip_bits
from support.kills import Toll, fill_disks, kill_recorders
from support.workload import record_log


def report(figure: str, seconds: float, wrong: list[str], **facts: object) -> bool:
    """Print one line, and up to five of what went wrong; whether all was well."""
    line = {"figure": figure, "seconds": round(seconds), "wrong": len(wrong)} | facts
    print(json.dumps(line | ({"examples": wrong[:5]} if wrong else {}), sort_keys=True), flush=True)
    return not wrong


def toll_report(figure: str, began: float, toll: Toll) -> bool:
    return report(
        figure,
        time.perf_counter() - began,
        toll.wrong,
        trials=toll.trials,
        acknowledged_events=toll.acknowledged,
        outcomes=dict(sorted(toll.outcomes.items())),
    )


def soak_kills(folder: Path, n: int, seed: int) -> bool:
    began = time.perf_counter()
    return toll_report("kills", began, kill_recorders(folder, n, seed=seed))


def soak_full(folder: Path, n: int) -> bool:
    began = time.perf_counter()
    return toll_report("full", began, fill_disks(folder, [4_000_000 * i // n for i in range(n)]))


def soak_states(folder: Path, n_events: int, seed: int) -> bool:
    began = time.perf_counter()
    calls = record_calls(n_events)
    found = survey(calls, folder, seed=seed)
    kinds = dict(sorted(Counter(c.kind for c in calls).items()))
    outcomes = dict(sorted(found.outcomes.items()))
    seconds = time.perf_counter() - began
    return report("states", seconds, found.wrong, states=found.states, calls=kinds, outcomes=outcomes)


def soak_flips(folder: Path, n: int, seed: int) -> bool:
    fine = True
    for name, seal in (("recorded", False), ("sealed", True)):
        log = folder / f"{name}.duckdb"
        record_log(log, 120, lambda line: None, seal=seal)
        for suffix in ("", ".wal", ".head.json")[:: 2 if seal else 1]:
            began = time.perf_counter()
            copies = folder / f"{name}{suffix}-flips"
            copies.mkdir()
            tally = flip_bits(log, suffix, copies, n=n, seed=seed)
            figure = f"flips in {name} log{suffix or ' file'}"
            missed = [f"byte {at} bit {bit}" for at, bit in tally.missed]
            noticed = dict(sorted(tally.noticed.items()))
            fine &= report(figure, time.perf_counter() - began, missed, flips=tally.flips, noticed_as=noticed)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--events", type=int, default=150, help="of the recording whose power cuts are tried")
    parser.add_argument("--limits", type=int, default=100)
    parser.add_argument("--flips", type=int, default=300, help="in each file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        fine = [
            soak_kills(folder, options.kills, options.seed),
            soak_states(folder, options.events, options.seed),
            soak_full(folder, options.limits),
            soak_flips(folder, options.flips, options.seed),
        ]
    return 0 if all(fine) else 1


if __name__ == "__main__":
    sys.exit(main())
