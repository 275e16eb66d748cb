"""How long `kvtape --help` and the completion of a policy take, each as a process of its own.

Prints one JSON line for each; the promise is 0.3 s.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time

RUNS = 15
LIMIT_S = 0.3

WORK = {
    "help": (["--help"], {}),
    "completion": (["record", "--policy", "stream:"], {"KVTAPE_COMPLETE": "bash"}),
}


def main() -> int:
    """Exit 1 when a median is over the limit."""
    return max(measure(name, args, more) for name, (args, more) in WORK.items())


def measure(name: str, args: list[str], environment: dict[str, str]) -> int:
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "kvtape.cli", *args],
            stdout=subprocess.DEVNULL,
            check=True,
            env={**os.environ, **environment},
        )
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    figures = {"median_s": round(median, 3), "fastest_s": round(min(seconds), 3), "slowest_s": round(max(seconds), 3)}
    print(json.dumps({"benchmark": name, "runs": RUNS, "limit_s": LIMIT_S, **figures}, sort_keys=True))
    return 0 if median <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
