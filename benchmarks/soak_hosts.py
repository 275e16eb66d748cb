"""Kill engine hosts at random points of recorded sessions: `make soak`. One JSON line an engine.

    python benchmarks/soak_hosts.py [--runs N] [--first SEED] [--engine NAME ...]

Each run kills the host of a session in a slot pool, with a signal, in a call and at a moment drawn from the run's seed
(tiny models). Then this process lives, the session is fatal with device_lost, the log verifies and holds every event,
the dead session's handle is refused, and the slot opens again on a new host. Exits 1 at the first run that is not so,
and names its seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.host_kills import KilledPool, KillPlan, Outcome
from support.isolated import children, descriptors, model_file


def kill_hosts(name: str, seeds: range) -> list[Outcome]:
    pool = KilledPool(name, model_file(name))
    outcomes: list[Outcome] = []
    for seed in seeds:
        plan = KillPlan.drawn(seed)
        with tempfile.TemporaryDirectory() as folder:
            try:
                outcomes.append(pool.run(Path(folder) / "log.duckdb", plan))
            except BaseException:
                print(f"{name}: {plan}", file=sys.stderr)
                raise
    pool.close()
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--engine", action="append", choices=("llama", "openvino"))
    asked = parser.parse_args()
    for name in asked.engine or ["llama", "openvino"]:
        before, open_before = children(), descriptors()
        outcomes = kill_hosts(name, range(asked.first, asked.first + asked.runs))
        facts = {
            "engine": name,
            "runs": len(outcomes),
            "found_in": dict(Counter(o.operation for o in outcomes).most_common()),
            "signals": dict(sorted(Counter(o.signal for o in outcomes).items())),
            "events": sum(o.events for o in outcomes),
            "processes_left": len(children() - before),
            "descriptors_left": descriptors() - open_before,
        }
        print(json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
