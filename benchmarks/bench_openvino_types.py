"""What storage types cost in numbers on OpenVINO and the demo model: each against f32 rows and f32 inference.

A prompt of 256 tokens of the essay that ships with kvtape, in chunks of 64, then 48 more decoded as they stand there;
once with every row in the cache, once with 96 taken out of the middle and the rest moved up. Prints a line of JSON for
each pair of types: mean and largest KL in nats, the share of equal first choices, the mean loss, milliseconds of
processor time a token, and bytes of a row. No limit.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.storage import PAIRS
from kvtape.backends.protocol import SessionConfig
from kvtape.cli.engine_text import essay
from kvtape.cli.models import demo_model

N_PROMPT, N_DECODE, CHUNK = 256, 48, 64
EVICTED = (64, 160)

F64 = npt.NDArray[np.float64]


def log_probs(
    engine: OpenVinoEngine, ids: list[int], pair: tuple[str, str, str], cut: bool
) -> tuple[F64, dict[str, Any]]:
    """Before each decoded token `[N_DECODE, n_vocab]`; and what it took."""
    keys, values, inference = pair
    options = {"kv": "asked", "inference": inference}
    config = SessionConfig(
        n_ctx=1024, chunk=CHUNK, kv_type_k=keys, kv_type_v=values, threads=1, options=options, uncertified=True
    )
    backend = engine.open(config)
    began = time.process_time()
    first = backend.prefill(ids[:N_PROMPT], 0).logits
    prefilled = time.process_time()
    if cut:
        start, stop = EVICTED
        backend.evict(start, stop)
        backend.shift(stop, N_PROMPT, start - stop)
    left, seen = iter(ids[N_PROMPT:]), []

    def choose(logits: npt.NDArray[np.float32]) -> int:
        seen.append(logits.astype(np.float64))
        return next(left)

    before = time.process_time()
    backend.decode_until(N_DECODE, backend.n_ctx, N_PROMPT, first, choose)
    took = {
        "prefill_ms": round((prefilled - began) / N_PROMPT * 1000, 2),
        "decode_ms": round((time.process_time() - before) / N_DECODE * 1000, 1),
        "row_bytes": backend.kv_bytes()["resident"] // sum(s.length for s in backend.books()),
    }
    backend.close()
    logits = np.stack(seen)
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)), took


def main() -> None:
    """Measure and print."""
    engine = OpenVinoEngine.load(demo_model())
    ids = list(engine.tokenize(essay()))[: N_PROMPT + N_DECODE]
    said = np.array(ids[N_PROMPT:])
    for cut in (False, True):
        base, _ = log_probs(engine, ids, ("f32", "f32", "f32"), cut)
        for pair in [(k, v, inference) for inference in ("f32", "bf16") for k, v in PAIRS[inference]]:
            found, took = log_probs(engine, ids, pair, cut)
            kl = (np.exp(base) * (base - found)).sum(axis=1)
            line = {
                "keys": pair[0],
                "values": pair[1],
                "inference": pair[2],
                "cut": cut,
                "mean_kl": float(f"{kl.mean():.2g}"),
                "max_kl": float(f"{kl.max():.2g}"),
                "top1": round(float((base.argmax(axis=1) == found.argmax(axis=1)).mean()), 3),
                "nll": round(float(-found[np.arange(N_DECODE), said].mean()), 4),
            }
            print(json.dumps(line | took), flush=True)


if __name__ == "__main__":
    main()
