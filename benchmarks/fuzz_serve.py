"""Thousands of requests drawn from the document that `kvtape serve` publishes, right and wrong ones. JSON on stdout.

    python benchmarks/fuzz_serve.py [--cases N] [--seed N] [--model F]

A server is started on the demo model; schemathesis draws the requests and checks every answer: no 5xx, no status, type
or body that is not in the document. Exit 1 at the first that is not. Some minutes; `--cases 100` for a glance.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode

from kvtape.cli.models import demo_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.drawn_requests import CHECKS, make_right

POSTS = ("/v1/chat/completions", "/v1/completions")
GETS = ("/v1/models", "/v1/models/{model}", "/health", "/metrics")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kvtape.cli", "serve", "--port", "0", "--n-ctx", "1024", "--slots", "2"]
        command += ["--log", f"{folder}/tapes", "--model", str(args.model or demo_model())]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            try:
                found = next(filter(None, (re.search(r"http://\S+?(?=,)", line) for line in server.stderr)))
                told = fuzz(found.group(), args.cases, args.seed)
            finally:
                server.terminate()
                server.stderr.read()
    print(json.dumps(told | {"server_exit": server.returncode}))
    return 0 if server.returncode == 0 else 1


def run(strategy: Any, n: int, number: int, *, mends: bool) -> Counter[int]:
    """Statuses of `n` requests; `mends` three of four."""
    seen: Counter[int] = Counter()
    count = itertools.count()

    @seed(number)
    @settings(
        max_examples=n, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def ask(case: Any) -> None:
        if mends:
            make_right(case, count, 2)
        response = case.call(timeout=120)
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    ask()
    return seen


def fuzz(url: str, cases: int, number: int) -> dict[str, Any]:
    """Cases and statuses by operation. Raises what a check raises."""
    document = schemathesis.openapi.from_url(f"{url}/openapi.json")
    statuses: dict[str, Counter[int]] = {}
    jobs = [
        (path, "POST", mode, cases // 5)
        for path in POSTS
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    ]
    jobs += [(path, "GET", GenerationMode.POSITIVE, max(1, cases // 20)) for path in GETS]
    for path, method, mode, n in jobs:
        strategy = document[path][method].as_strategy(generation_mode=mode)
        statuses[f"{method} {path} {mode.name.lower()}"] = run(
            strategy, n, number, mends=mode is GenerationMode.POSITIVE
        )
    return {
        "cases": sum(sum(c.values()) for c in statuses.values()),
        "statuses": {name: dict(sorted(c.items())) for name, c in statuses.items()},
    }


if __name__ == "__main__":
    sys.exit(main())
