"""What attention scores cost on OpenVINO and the demo model: the same prefill and decode with scores off and on.

Also a probe of 32 tokens, and the last window of as many computed again. Off and on take turns; medians of the
processor time, which neighbours disturb less than they do the clock. No limit: prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.session import OpenVinoBackend
from kvtape.backends.protocol import DecodeRun, SessionConfig
from kvtape.cli.models import demo_model

ROUNDS = 3
N_PROMPT, N_DECODE, N_SCORED = 2048, 32, 32
TEXT = "The cache remembers what the page forgot, and the reader goes on to the next one. "


def seconds(work: Callable[[], object]) -> float:
    """Processor time, the engine's thread included."""
    began = time.process_time()
    work()
    return time.process_time() - began


def measure(engine: OpenVinoEngine, scores: str, tokens: list[int]) -> tuple[dict[str, float], bytes]:
    """Milliseconds of each operation, and the bytes of the logits: scores must not change them."""
    config = SessionConfig(n_ctx=N_PROMPT + 256, chunk=512, threads=1, options={"scores": scores})
    backend = engine.open(config)
    took: dict[str, float] = {}
    took["prefill_ms_per_token"] = seconds(lambda: backend.prefill(tokens[:N_PROMPT], 0)) / N_PROMPT * 1000
    if scores == "on":
        took |= measure_scores(backend, tokens)
    left = iter(tokens[N_PROMPT:])
    logits = backend.prefill([next(left)], N_PROMPT).logits
    runs: list[DecodeRun] = []

    def decode() -> None:
        runs.append(backend.decode_until(N_DECODE, backend.n_ctx, N_PROMPT + 1, logits, lambda _: next(left)))
        if scores == "on":
            backend.take_mass()  # what waited is worked out here at the latest

    took["decode_ms_per_token"] = seconds(decode) / N_DECODE * 1000
    backend.close()
    return took, runs[0].logits.tobytes()


def measure_scores(backend: OpenVinoBackend, tokens: list[int]) -> dict[str, float]:
    window = N_PROMPT - N_SCORED
    return {
        "take_ms": seconds(backend.take_mass) * 1000,
        "probe_ms": seconds(lambda: backend.score(tokens[:N_SCORED], N_PROMPT)) * 1000,
        "window_ms": seconds(lambda: backend.score(tokens[window:N_PROMPT], window)) * 1000,
    }


def main() -> int:
    """Exit 1 when scores changed a logit."""
    engine = OpenVinoEngine.load(demo_model())
    tokens = (engine.tokenize(TEXT) * 200)[: N_PROMPT + N_DECODE + 2]
    seen: set[bytes] = set()
    rounds: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for _ in range(ROUNDS):
        for scores, figures in rounds.items():
            took, logits = measure(engine, scores, tokens)
            figures.append(took)
            seen.add(logits)
    engine.close()
    medians = {
        f"{scores}_{name}": round(statistics.median(took[name] for took in figures), 2)
        for scores, figures in rounds.items()
        for name in figures[0]
    }
    ratios = {
        f"{what}_ratio": round(medians[f"on_{what}_ms_per_token"] / medians[f"off_{what}_ms_per_token"], 3)
        for what in ("prefill", "decode")
    }
    result = {"rounds": ROUNDS, "prompt": N_PROMPT, "scored": N_SCORED, "logits_equal": len(seen) == 1}
    print(json.dumps({"benchmark": "scores_openvino", **result, **medians, **ratios}, sort_keys=True))
    return 0 if len(seen) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
