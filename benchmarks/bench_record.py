"""What recording costs a decode token, at the thread that decodes, beside the same loop without session or log.

Two contexts of one model hold the same prompt and decode the same tokens in turn; the figure is the median of the
paired ratios of the calling thread's CPU time. Prints one JSON line; the promise is at most 1 %.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.protocol import Backend, Engine, Logits, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.backends.session import Session
from kvtape.cli.models import demo_model
from kvtape.cli.recording import live_run
from kvtape.planner.specs import parse_policy
from kvtape.traces.recorder import Recorder

PROMPT_TOKENS = 200
ROUND_TOKENS = 64
ROUNDS = 12
N_CTX = 1024
LIMIT = 0.01


def raw_round(backend: Backend, logits: Logits, tape: int) -> tuple[int, Logits]:
    began = time.thread_time_ns()
    run = backend.decode_until(ROUND_TOKENS, N_CTX, tape, logits, lambda row: int(row.argmax()))
    return time.thread_time_ns() - began, run.logits


def recorded_round(session: Session) -> int:
    began = time.thread_time_ns()
    session.decode(ROUND_TOKENS, stop_tokens=frozenset())
    return time.thread_time_ns() - began


def measure(engine: Engine, folder: Path, *, raw_first: bool) -> tuple[list[float], list[float]]:
    """Paired ratios, and microseconds a token that recording added, of ROUNDS rounds."""
    prompt = (engine.tokenize("The cache remembers what the page forgot, and the reader goes on. ") * 40)[
        :PROMPT_TOKENS
    ]
    config, clock = SessionConfig(n_ctx=N_CTX), MonotonicClock()
    run = live_run({"benchmark": "record"}, engine, clock)
    recorder = Recorder(folder / f"{raw_first}.duckdb", run, clock=clock)
    contexts = [engine.open(config), engine.open(config)]
    raw, recorded_backend = contexts if raw_first else reversed(contexts)
    session = Session(
        recorded_backend, parse_policy("none"), recorder, clock, run_id=run.run_id, session_id="s", content=True
    )
    session.ensure_prefix(prompt)
    logits = raw.prefill(prompt, 0).logits
    tape = PROMPT_TOKENS
    ratios: list[float] = []
    per_token: list[float] = []
    for number in range(ROUNDS):
        recorded = recorded_round(session) if number % 2 else 0
        plain, logits = raw_round(raw, logits, tape)
        recorded = recorded or recorded_round(session)
        tape += ROUND_TOKENS
        ratios.append(recorded / plain)
        per_token.append((recorded - plain) / ROUND_TOKENS / 1000)
    session.close()
    recorder.close()
    raw.close()
    return ratios, per_token


def main() -> int:
    """Exit 1 when the overhead is over the limit."""
    engine = open_engine("llama", demo_model())
    with tempfile.TemporaryDirectory() as folder:
        # Two contexts never stand alike in memory: each side has the first one once, and the two medians are averaged.
        halves = [measure(engine, Path(folder), raw_first=first) for first in (True, False)]
    engine.close()
    overhead = statistics.mean(statistics.median(ratios) for ratios, _ in halves) - 1
    figures = {
        "overhead": round(overhead, 4),
        "overhead_us_per_token": round(statistics.mean(statistics.median(us) for _, us in halves), 1),
        "ratio_min": round(min(r for ratios, _ in halves for r in ratios), 4),
        "ratio_max": round(max(r for ratios, _ in halves for r in ratios), 4),
    }
    print(json.dumps({"benchmark": "record", "limit": LIMIT, "rounds": 2 * ROUNDS, **figures}, sort_keys=True))
    return 0 if overhead <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
