"""OpenVINO's continuous batching beside kvtape's policies, and a proof row for each of its sparse options.

    python benchmarks/bench_batching.py [--full] [--out docs/continuous-batching.json]

The demo model is converted to F16 (the pipeline misreads the file as it is) and that to an OpenVINO model folder, both
in a temporary folder. Prompts are stretches of the shipped essay, and what follows each is forced on both sides.

native      `kvtape eval --task batching` on the F16 file, a budget of 8 blocks
greedy      the same, but with what the pipeline finds likeliest
folder      the same, both sides on the same OpenVINO model folder
options     `--prove-options`

Without `--full`: 2 prompts and a budget of 8 blocks, no greedy, no folder, no options: some two minutes. Exits 1 when
the two sides, keeping everything, say different things of the same tokens, or when a policy did not hold as many rows
as the pipeline did. Prints JSON lines; `--out` keeps what the page is made of (`make docs`).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from kvtape.backends.clock import WallClock, utc_day
from kvtape.cli import main as kvtape
from kvtape.cli.models import demo_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.openvino_ir import save_ir
from support.rewritten_gguf import rewrite_gguf

ESSAY = Path(__file__).parents[1] / "cli" / "text" / "essay.txt"
POLICIES = ("stream", "h2o:norm=mean", "snapkv", "random")
TRAINED = 8192
TOKENS, NEW = 400, 48
PROOF_TOKENS = 320


def evaluate(model: Path, *more: object) -> dict[str, Any]:
    """The JSON of `kvtape eval --task batching`."""
    args = ["eval", "--task", "batching", "--model", model, "--text", ESSAY, "--chunk", 256, "--json", *more]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = kvtape([str(a) for a in args])
    if code not in (0, 1):
        raise SystemExit(code)
    body: dict[str, Any] = json.loads(out.getvalue())
    return body


def compared(model: Path, seeds: str, *more: object) -> dict[str, Any]:
    policies = [part for policy in POLICIES for part in ("--policy", policy)]
    sizes = ("--tokens", TOKENS, "--new-tokens", NEW, "--budget-blocks", 8)
    return evaluate(model, "--seeds", seeds, *sizes, *policies, *more)


def missed(name: str, body: dict[str, Any]) -> list[str]:
    """What was promised and is not so."""
    found = [f"{name}: {label}: both sides differ" for label, a in body["agreement"].items() if not a["same_model"]]
    unequal = [row for row in body["rows"] if row["kind"] == "policy" and not row["rows_equal"]]
    return found + [f"{name}: {row['policy']} beside {row['comparator']}: other rows" for row in unequal]


def main() -> int:
    """Exit 1 when something promised is not so."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", action="append", choices=("native", "greedy", "folder", "options"))
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvtape-bench-"))
    failed: list[str] = []
    known = json.loads(asked.out.read_text("utf-8")) if asked.out and asked.out.exists() else {}
    try:
        f16 = rewrite_gguf(demo_model(), folder / "SmolLM2-135M-Instruct.F16.gguf", storage="f16")
        seeds = "0:5" if asked.full else "0:2"
        runs = {
            "native": lambda: compared(f16, seeds),
            "greedy": lambda: compared(f16, seeds, "--continue", "greedy"),
            "folder": lambda: compared(save_ir(f16, folder / "ir", TRAINED), seeds),
            "options": lambda: evaluate(f16, "--prove-options", "--tokens", PROOF_TOKENS, "--budget-blocks", 4),
        }
        for name in asked.only or (list(runs) if asked.full else ["native"]):
            body = runs[name]()
            failed += missed(name, body) if name != "options" else []
            known[name] = body | {"day": utc_day(WallClock())}
            for row in body["rows"]:
                print(json.dumps({"benchmark": "batching", "run": name, **row}, sort_keys=True), flush=True)
            if asked.out:
                asked.out.write_text(json.dumps(known, sort_keys=True, indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(folder)
    for what in failed:
        print(what, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
