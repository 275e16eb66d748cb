"""What a capture costs a `llama_cpp.Llama`, at the thread that calls it: the same chats on two of them, one captured.

Greedy completions on one model, in turn, long enough to be decode for the most part; each pair is asked in both orders.
Prints one JSON line: the median ratio of the calling thread's CPU time, and microseconds that each token costs. A token
of the demo model takes milliseconds; the promise is at most 3 %.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kvtape.cli.models import demo_model
from kvtape.serve import capture

N_CTX = 1024
ANSWER_TOKENS = 64
ROUNDS = 10
LIMIT = 1.03
PROMPT = "The cache remembers what the page forgot, and the reader goes on. " * 8


def load(model: Path) -> Any:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import llama_cpp

    return llama_cpp.Llama(str(model), n_ctx=N_CTX, n_threads=1, n_threads_batch=1, seed=1, verbose=False)


def completion(llama: Any, number: int) -> tuple[int, str]:
    """Nanoseconds of this thread, and what was said. The prompt shares its beginning with the one before."""
    began = time.thread_time_ns()
    answer = llama.create_completion(f"{PROMPT}{number}", max_tokens=ANSWER_TOKENS, temperature=0.0)
    return time.thread_time_ns() - began, answer["choices"][0]["text"]


def measure(model: Path, folder: Path, *, captured_first: bool, check: bool) -> tuple[list[float], list[float]]:
    """Ratios of the pairs, and microseconds a token."""
    pair = [load(model), load(model)]
    captured, bare = pair if captured_first else reversed(pair)
    ratios: list[float] = []
    per_token: list[float] = []
    with ExitStack() as stack:
        for llama in pair:
            stack.callback(llama.close)
        stack.enter_context(capture(captured, log=folder / f"{captured_first}-{check}", check=check, on_error="raise"))
        for number in range(ROUNDS + 1):
            order = (captured, bare) if number % 2 else (bare, captured)
            times = {id(llama): completion(llama, number) for llama in order}
            (with_tape, said), (without, expected) = times[id(captured)], times[id(bare)]
            if said != expected:
                raise AssertionError(f"round {number}: the captured model says something else")
            if number:  # the first warms both up
                ratios.append(with_tape / without)
                per_token.append((with_tape - without) / ANSWER_TOKENS / 1000)
    return ratios, per_token


def main() -> int:
    """Exit 1 when the overhead without `check` is over the limit."""
    model = demo_model()
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for check in (False, True):
            # Two contexts never stand alike in memory: each side has the first one once.
            halves = [measure(model, Path(folder), captured_first=first, check=check) for first in (True, False)]
            name = "checked" if check else "captured"
            found[f"{name}_ratio"] = round(statistics.mean(statistics.median(r) for r, _ in halves), 4)
            found[f"{name}_us_per_token"] = round(statistics.mean(statistics.median(t) for _, t in halves), 1)
    print(json.dumps({"benchmark": "capture", "model": model.name, "answer_tokens": ANSWER_TOKENS, **found}))
    return 0 if found["captured_ratio"] <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
