"""What residual rows, coded or not, give and cost on the demo model: each engine beside `standard`. JSON lines.

    python benchmarks/bench_cold_rows.py [--stretches N] [--prompt N] [--steps N] [--window N] [--layers] [--model F]

Every engine gets the same stretches of the shipped essay: a prompt, then steps with the text's own tokens.

mean_kl, max_kl     KL(standard || engine) of the steps, in nats; `limit` is what the engine states
top1, nll_delta     share of steps with the same first choice; mean of engine's NLL of the text less that of standard
diverged_at         first step of any stretch with another first choice, or null
same_bits           whether every hidden row is that of standard
times               CPU time of a step over that of standard in the same run
bytes               by kind, occupied, of the last stretch
layer_kl            with --layers: mean KL where this layer alone is q8_0, and all others are f32

Exit 1 when a stated bound is missed, or an exact engine has another bit.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from kvtape.backends.logits import log_softmax
from kvtape.backends.reference.engines import boundary_per_layer, markov_rs_codec
from kvtape.backends.reference.engines.engine import KvEngine
from kvtape.backends.reference.engines.registry import make_engine, parse_engine
from kvtape.backends.reference.model.dispatch import logits_of
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.weights import Weights
from kvtape.cli.models import demo_model

ESSAY = Path(__file__).parents[1] / "cli" / "text" / "essay.txt"


@dataclass
class Steps:
    """Of all stretches: log probabilities `[n, n_vocab]` after each step, hidden rows, CPU seconds of the steps."""

    log_p: list[Any] = field(default_factory=list)
    hidden: list[Any] = field(default_factory=list)
    seconds: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)


def main() -> int:
    args = _arguments()
    weights = Weights(args.model)
    tokens = _stretches(args)
    standard = _steps("standard", weights, tokens, args)
    n_layer, missed = weights.architecture.n_layer, False
    for spec, limit in _specs(args.window, n_layer).items():
        row = _beside(standard, _steps(spec, weights, tokens, args), tokens, args)
        missed |= row["mean_kl"] > limit or (not limit and not row["same_bits"])
        print(json.dumps({"engine": spec, "limit": limit, **row}), flush=True)
    for layer in range(n_layer if args.layers else 0):
        runs = [f"f32x{layer}"] * bool(layer) + ["q8_0x1"] + [f"f32x{n_layer - layer - 1}"] * (layer < n_layer - 1)
        spec = f"boundary-per-layer:window={args.window},codecs={'+'.join(runs)}"
        row = _beside(standard, _steps(spec, weights, tokens, args), tokens, args)
        print(json.dumps({"layer": layer, "layer_kl": row["mean_kl"], "top1": row["top1"]}), flush=True)
    return int(missed)


def _specs(window: int, n_layer: int) -> dict[str, float]:
    """Engines and the mean KL that they state, 0 for exact ones. Of the demo model the lower layers bear q8_0 best."""
    per_layer = f"boundary-per-layer:window={window}"
    return {
        "boundary-kv:chunk=64": 0.0,
        f"markov-rs:window={window}": 0.0,
        f"markov-rs-codec:window={window}": markov_rs_codec.KL_BOUND,
        per_layer: boundary_per_layer.KL_BOUND,
        f"{per_layer},codecs=q8_0x{2 * n_layer // 5}+bf16": boundary_per_layer.KL_BOUND,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--stretches", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--layers", action="store_true")
    args = parser.parse_args()
    args.model = args.model or demo_model()
    return args


def _stretches(args: argparse.Namespace) -> list[list[int]]:
    llama = llama_cpp.Llama(str(args.model), vocab_only=True, verbose=False)
    tokens = list(llama.tokenize(ESSAY.read_bytes(), add_bos=False))
    size = args.prompt + args.steps + 1
    if args.stretches * size > len(tokens):
        raise SystemExit(f"the text has {len(tokens)} tokens, {args.stretches * size} are asked for")
    return [tokens[i * size : (i + 1) * size] for i in range(args.stretches)]


def _steps(spec: str, weights: Weights, stretches: list[list[int]], args: argparse.Namespace) -> Steps:
    done, local = Steps(), LocalFfn(weights)
    for tokens in stretches:
        engine = make_engine(parse_engine(spec))
        assert isinstance(engine, KvEngine)
        engine.prefill(weights, local, tokens[: args.prompt])
        begun = time.process_time()
        hidden = [engine.decode_step(weights, local, token) for token in tokens[args.prompt : -1]]
        done.seconds += time.process_time() - begun
        done.hidden += hidden
        done.log_p.append(log_softmax(logits_of(weights, np.concatenate(hidden))))
        done.bytes = {kind.kind: kind.occupied for kind in engine.memory().kinds}
    return done


def _beside(standard: Steps, engine: Steps, stretches: list[list[int]], args: argparse.Namespace) -> dict[str, Any]:
    p, q = np.concatenate(standard.log_p), np.concatenate(engine.log_p)
    kl = (np.exp(p) * (p - q)).sum(axis=1)
    same = p.argmax(axis=1) == q.argmax(axis=1)
    after = np.concatenate([tokens[args.prompt + 1 :] for tokens in stretches])
    rows = np.arange(len(after))
    other = np.flatnonzero(~same.reshape(len(stretches), -1).all(axis=0))
    return {
        "steps": len(kl),
        "mean_kl": float(kl.mean()),
        "max_kl": float(kl.max()),
        "top1": float(same.mean()),
        "nll_delta": float((p[rows, after] - q[rows, after]).mean()),
        "diverged_at": int(other[0]) if len(other) else None,
        "same_bits": bool(np.array_equal(np.concatenate(standard.hidden), np.concatenate(engine.hidden))),
        "times": engine.seconds / standard.seconds,
        "bytes": engine.bytes,
    }


if __name__ == "__main__":
    raise SystemExit(main())
