"""What turbo-quant keeps of the demo model's rows, and what it costs, beside `standard`. JSON lines.

    python benchmarks/bench_turbo.py [--stretches N] [--prompt N] [--steps N] [--model F]

cosine_k, cosine_v  mean cosine of decoded rows with those of `standard`, over all layers and the prompts' rows; `floor`
                    is what the engine promises of both together
mean_kl, max_kl     KL(standard || engine) of the steps, in nats, each step given the text's own token
top1, nll_delta     share of steps with the same first choice; mean NLL of the text less that of standard
diverged_at         first step of any stretch with another first choice, or null
to_f16, to_f32      how many times less than rows of such floats
times               CPU time of a step over that of standard in the same run

Exit 1 when a mean cosine is below its floor.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import json
import time
from pathlib import Path

import llama_cpp
import numpy as np

from kvtape.backends.reference.engines.engine import KvEngine
from kvtape.backends.reference.engines.registry import make_engine, parse_engine
from kvtape.backends.reference.engines.turbo_quant import FLOORS, TurboQuantEngine
from kvtape.backends.reference.model.dispatch import logits_of
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.weights import Weights
from kvtape.cli.models import demo_model

ESSAY = Path(__file__).parents[1] / "cli" / "text" / "essay.txt"


class Run:
    """One engine over all stretches: log probabilities after each step, and rows `[n, components]` of the prompts."""

    def __init__(self, spec: str, weights: Weights, stretches: list[list[int]], n_prompt: int) -> None:
        self.log_p: list[np.ndarray] = []
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.seconds = 0.0
        local = LocalFfn(weights)
        for tokens in stretches:
            engine = make_engine(parse_engine(spec))
            assert isinstance(engine, KvEngine)
            engine.prefill(weights, local, tokens[:n_prompt])
            for layer in range(weights.architecture.n_layer):
                for position in range(0, n_prompt, 4):
                    row = engine.read_kv_row(layer, position)
                    assert row is not None
                    self.keys.append(row[0].ravel())
                    self.values.append(row[1].ravel())
            for token in tokens[n_prompt:]:
                begun = time.process_time()
                hidden = engine.decode_step(weights, local, token)
                self.seconds += time.process_time() - begun
                logits = logits_of(weights, hidden)[0].astype(np.float64)
                self.log_p.append(logits - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        self.engine = engine


def cosine(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    one, other = np.stack(a).astype(np.float64), np.stack(b).astype(np.float64)
    return float(np.mean((one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)))


def compared(bits: int, exact: Run, coded: Run, following: np.ndarray, n_steps: int) -> dict[str, object]:
    p, q = np.stack(exact.log_p), np.stack(coded.log_p)
    kl = (np.exp(p) * (p - q)).sum(1)
    same = p.argmax(1) == q.argmax(1)
    # The last step of a stretch has no token of the text behind it.
    known = np.arange(len(p)) % n_steps < n_steps - 1
    at = np.flatnonzero(known)
    nll = [-run[at, following[at]].mean() for run in (p, q)]
    first = np.flatnonzero(~same) % n_steps
    assert isinstance(coded.engine, TurboQuantEngine)
    return {
        "engine": coded.engine.info.spec,
        "floor": FLOORS[bits],
        "cosine_k": round(cosine(exact.keys, coded.keys), 5),
        "cosine_v": round(cosine(exact.values, coded.values), 5),
        "rows": 2 * len(exact.keys),
        "steps": len(p),
        "mean_kl": float(f"{kl.mean():.3g}"),
        "max_kl": float(f"{kl.max():.3g}"),
        "top1": round(float(same.mean()), 4),
        "nll_delta": round(float(nll[1] - nll[0]), 5),
        "diverged_at": int(first.min()) if len(first) else None,
        "to_f16": round(coded.engine.ratio_to(2), 3),
        "to_f32": round(coded.engine.ratio_to(4), 3),
        "times": round(coded.seconds / exact.seconds, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stretches", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--model", type=Path, default=None)
    asked = parser.parse_args()
    path = asked.model or demo_model()
    tokenizer = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    tokens = tokenizer.tokenize(ESSAY.read_bytes(), add_bos=False)
    length = asked.prompt + asked.steps
    stretches = [tokens[i * length : (i + 1) * length] for i in range(asked.stretches)]
    following = np.concatenate([[*stretch[asked.prompt + 1 :], 0] for stretch in stretches])
    weights, failed = Weights(path), False
    exact = Run("standard", weights, stretches, asked.prompt)
    for bits in (4, 3):
        told = compared(
            bits, exact, Run(f"turbo-quant:bits={bits}", weights, stretches, asked.prompt), following, asked.steps
        )
        failed |= (float(str(told["cosine_k"])) + float(str(told["cosine_v"]))) / 2 < FLOORS[bits]
        print(json.dumps(told), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
