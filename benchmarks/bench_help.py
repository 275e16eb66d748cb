"""How long `kvtape --help` takes, as a process of its own. Prints one JSON line; the promise is 0.3 s."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

RUNS = 15
LIMIT_S = 0.3


def main() -> int:
    """Exit 1 when the median is over the limit."""
    seconds = []
    for _ in range(RUNS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "kvtape.cli", "--help"], stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds)
    figures = {"median_s": round(median, 3), "fastest_s": round(min(seconds), 3), "slowest_s": round(max(seconds), 3)}
    print(json.dumps({"benchmark": "help", "runs": RUNS, "limit_s": LIMIT_S, **figures}, sort_keys=True))
    return 0 if median <= LIMIT_S else 1


if __name__ == "__main__":
    sys.exit(main())
