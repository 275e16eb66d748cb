"""Every KV engine beside `standard` on the demo model, and three of them against a loop that is no engine. JSON lines.

    python benchmarks/bench_engines.py [--engine SPEC ...] [--prompts N] [--prompt N] [--steps N] [--streams N]
                                       [--stream-tokens N] [--window N] [--every N] [--packed] [--model F]

Prompts are stretches of the shipped essay, and behind each the text's own tokens are given, to every engine and to
`standard`.

accuracy            after every `--every` prompts a row of `kvtape bench --json`, with CPU time in place of time;
                    `step_times` is that of a step over that of a step of `standard` in the same run
streams             on how many of `--streams` prompts `standard`, `markov-bounded` (`standard:window=N`) and `none` say
                    the very tokens that `generate_cached` says

Exit 1 when an engine broke its promise, or a stream parts. Nearly an hour on one core; `--prompts 2 --streams 2` for a
glance. `bench_turbo.py`, `bench_cold_rows.py` and `bench_apollo.py` look closer at some of them.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import time
from collections import Counter
from pathlib import Path

import llama_cpp

from kvtape.backends.reference.engines.registry import engine_entries, parse_engine
from kvtape.backends.reference.model.weights import Weights
from kvtape.cli.models import demo_model
from kvtape.eval.engine_accuracy import EngineComparison
from kvtape.eval.engine_cases import EngineCase, text_cases
from kvtape.eval.engine_report import accuracy_row
from kvtape.eval.engine_streams import parted_streams

ESSAY = Path(__file__).parents[1] / "cli" / "text" / "essay.txt"
# Each engine in a spec in which what is its own happens within the steps.
SPECS = (
    "no-cache",
    "boundary-kv:chunk=64",
    "markov-rs:window=32",
    "markov-rs-codec:window=32",
    "boundary-per-layer:window=32",
    "standard:window=64",
    "windowed-checkpoint:window=64",
    "tq4",
    "tq3",
    "apollo:layer=20",
)


class CpuClock:
    """What this process computed: a shared machine's other work is no engine's."""

    def now_ns(self) -> int:
        return time.process_time_ns()


def main() -> int:
    args = _arguments()
    weights = Weights(args.model, packed=args.packed)
    cases = _cases(args.model, args.prompts, args.prompt, args.steps)
    broken = bool(args.engine) and _accuracy(weights, cases, args)
    return int(_streams(weights, cases[: args.streams], args.stream_tokens, args.window) or broken)


def _accuracy(weights: Weights, cases: list[EngineCase], args: argparse.Namespace) -> bool:
    """Whether a promise was broken. The rows so far after every few prompts."""
    choices = [parse_engine(spec) for spec in args.engine]
    comparison = EngineComparison(weights, choices, steps=args.steps, top_k=5, clock=CpuClock())
    for number, case in enumerate(cases, 1):
        comparison.add(case)
        if number % args.every == 0 or number == len(cases):
            rows = [accuracy_row(track, weights.report()) for track in comparison.tracks]
            for row in rows:
                print(json.dumps({"what": "accuracy", **row}), flush=True)
    return any(row["kept"] is False or not row["served"] for row in rows)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engine", action="append")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--streams", type=int, default=20)
    parser.add_argument("--stream-tokens", type=int, default=16)
    parser.add_argument("--window", type=int, default=16)
    parser.add_argument("--every", type=int, default=5, help="rows after so many prompts")
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--model", type=Path, default=None)
    args = parser.parse_args()
    args.model = args.model or demo_model()
    named = {parse_engine(spec).entry.name for spec in SPECS}
    assert named == {entry.name for entry in engine_entries()}, "an engine of the catalogue has no spec here"
    args.engine = list(SPECS) if args.engine is None else [spec for spec in args.engine if spec]
    return args


def _cases(model: Path, n: int, prompt: int, steps: int) -> list[EngineCase]:
    llama = llama_cpp.Llama(str(model), vocab_only=True, verbose=False)
    tokens = llama.tokenize(ESSAY.read_bytes(), add_bos=False)
    return text_cases("essay", tokens, n=n, prompt_tokens=prompt, steps=steps)


def _streams(weights: Weights, cases: list[EngineCase], n: int, window: int) -> bool:
    """Whether any of them parts."""
    same: Counter[str] = Counter()
    parted: list[str] = []
    for case in cases:
        for kind, at in parted_streams(weights, case.prompt, n, window).items():
            same[kind] += at is None
            parted += [f"{kind} at token {at} of {case.name}"] * (at is not None)
    if cases:
        said = {"prompts": len(cases), "tokens": n, "window": window, "same": dict(same), "parted": parted}
        print(json.dumps({"what": "streams", **said}), flush=True)
    return bool(parted)


if __name__ == "__main__":
    raise SystemExit(main())
