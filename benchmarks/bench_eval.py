"""What the policies are worth: recall of a planted fact after most of the context was evicted, on both engines.

`python benchmarks/bench_eval.py` asks 6 seeds at one budget, some minutes; `--full` 40 seeds at two budgets, half an
hour for each format. Exits 1 unless `snapkv` scored by the question recalls more than `stream`, with 95 % intervals
that do not overlap, at every budget on every backend. Prints one JSON line a row; `--markdown` a table.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
from typing import Any

from kvtape.cli import main as kvtape

STREAM = "stream"
PROBED = "snapkv:sink=4,recent=32,queries=probe"
POLICIES = (
    STREAM,
    "random:sink=4,recent=32",
    PROBED,
    f"{PROBED},layers=all",
    "snapkv:sink=4,recent=32",
    "tova:sink=4,recent=32",
    "h2o:sink=4,recent=32",
    "h2o:sink=4,recent=32,norm=mean",
)


def evaluate(format_name: str, backend: str, seeds: str, budgets: list[str]) -> list[dict[str, Any]]:
    """The rows of `kvtape eval`."""
    args = ["eval", "--task", "needle", "--format", format_name, "--backend", backend, "--seeds", seeds, "--json"]
    args += [part for policy in POLICIES for part in ("--policy", policy)]
    args += [part for budget in budgets for part in ("--budget", budget)]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = kvtape(args)
    if code:
        raise SystemExit(code)
    rows: list[dict[str, Any]] = json.loads(out.getvalue())["rows"]
    return rows


def overlaps(rows: list[dict[str, Any]]) -> list[str]:
    """Where the scored policy's interval is not wholly above the window's."""
    low = {r["budget"]: r["recall_low"] for r in rows if "probe" in r["policy"] and "layers=" not in r["policy"]}
    high = {r["budget"]: r["recall_high"] for r in rows if r["policy"].startswith(STREAM)}
    return [f"{rows[0]['backend']} at {budget}" for budget in low if low[budget] <= high[budget]]


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """A table, with the interval behind the recall."""
    head = ["| policy | budget | recall | 95 % | correct | kept |", "|---|---|---|---|---|---|"]
    return head + [
        f"| `{r['policy']}` | {r['budget'] or 'all'} | {r['recall']:.3f} "
        f"| {r['recall_low']:.3f} to {r['recall_high']:.3f} | {r['correct']} of {r['n']} | {r['kept']:.0f} |"
        for r in rows
    ]


def main() -> int:
    """Exit 1 when the claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--format", default="city", choices=("city", "passkey"))
    parser.add_argument("--backend", action="append")
    asked = parser.parse_args()
    seeds, budgets = ("0:40", ["128", "256"]) if asked.full else ("0:6", ["128"])
    failed = []
    for backend in asked.backend or ["llama:scores=on", "openvino:scores=on"]:
        rows = evaluate(asked.format, backend, seeds, budgets)
        failed += overlaps(rows)
        if asked.markdown:
            print("\n".join([f"### {backend}, {asked.format}", *markdown(rows)]), flush=True)
        else:
            for row in rows:
                print(json.dumps({"benchmark": "eval", "format": asked.format, **row}, sort_keys=True), flush=True)
    for what in failed:
        print(f"{what}: the intervals of {PROBED} and {STREAM} overlap", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
