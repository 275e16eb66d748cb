"""What a host process costs, beside the same engine in this process, on the demo model. Prints a JSON line an engine.

Two sessions compute the same tokens in turn, one in a host. The ratios are medians of paired rounds; `decode_cpu` is
processor time of both processes together. `token_us` and `call_us` are what stands between a token (logits come, the
token goes) or a plain call and its answer, measured on an engine that computes nothing. `start_s` is from nothing to
a loaded model, `load_s` the same in this process. Exit 1 when a decoded token costs over a tenth more processor time
in a host.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtape.backends.isolated.engine import IsolatedEngine, open_isolated
from kvtape.backends.protocol import Backend, Choose, DecodeRun, Engine, Logits, ModelFacts, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.cli.models import demo_model
from kvtape.planner.ranges import RangeSet
from kvtape.testing.toy import ToyBackend

ENGINES = ("llama", "openvino")
PROMPT_TOKENS = 256
DECODE_TOKENS = 16
ROUNDS = 9
CALLS = 2000
N_CTX = 1024
N_VOCAB = 49152
CPU_LIMIT = 1.10
TEXT = "The cache remembers what the page forgot, and the reader goes on to the next one. "


class Instant(ToyBackend):
    """Decodes in no time, with logits of the demo model's size."""

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        for _ in range(n):
            choose(logits)
        return DecodeRun((), logits, 0, "n")


class InstantEngine:
    name, version = "instant", "1"
    facts = ModelFacts("none", "none/1", "none", N_VOCAB, 1 << 20, frozenset())

    def tokenize(self, text: str) -> list[int]:
        return []

    def detokenize(self, tokens: Sequence[int]) -> str:
        return ""

    def open(self, config: SessionConfig) -> Backend:
        return Instant(config)

    def close(self) -> None:
        pass


def load_instant(name: str, path: str | Path, options: Mapping[str, str]) -> Engine:
    return InstantEngine()


def greedy(row: Logits) -> int:
    return int(row.argmax())


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def round_trips() -> dict[str, float]:
    engine = open_isolated("instant", "none", loader="bench_isolate:load_instant")
    backend = engine.open(SessionConfig())
    row = np.zeros(N_VOCAB, np.float32)
    tokens = [seconds(lambda: backend.decode_until(CALLS, 1 << 30, 0, row, lambda _: 1)) for _ in range(3)]
    calls = [seconds(lambda: [backend.kv_bytes() for _ in range(CALLS)]) for _ in range(3)]
    engine.close()
    return {"token_us": round(min(tokens) / CALLS * 1e6, 1), "call_us": round(min(calls) / CALLS * 1e6, 1)}


def cpu(engine: Engine) -> float:
    """Processor seconds so far of this process, and of the engine's host where it has one."""
    own = time.process_time()
    if not isinstance(engine, IsolatedEngine):
        return own
    fields = Path(f"/proc/{engine.host_pid}/stat").read_text().rpartition(")")[2].split()
    return own + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compute(engine: Engine, backend: Backend, prompt: list[int]) -> dict[str, float]:
    """Seconds of one prefill and one decode, and processor seconds of the decode."""
    backend.rebuild(RangeSet(), [])
    logits: list[Logits] = []
    prefill = seconds(lambda: logits.append(backend.prefill(prompt, 0).logits))
    before = cpu(engine)
    decode = seconds(lambda: backend.decode_until(DECODE_TOKENS, N_CTX, len(prompt), logits[0], greedy))
    return {"prefill": prefill, "decode": decode, "decode_cpu": cpu(engine) - before}


def measure(name: str) -> dict[str, Any]:
    path = demo_model()
    engines: dict[str, Engine] = {}
    figures: dict[str, float] = {}
    figures["load_s"] = round(seconds(lambda: engines.update(here=open_engine(name, path))), 2)
    figures["start_s"] = round(seconds(lambda: engines.update(host=open_isolated(name, path))), 2)
    prompt = (engines["here"].tokenize(TEXT) * 40)[:PROMPT_TOKENS]
    sessions = {where: engine.open(SessionConfig(n_ctx=N_CTX)) for where, engine in engines.items()}
    rounds = []
    for turn in range(ROUNDS + 1):
        order = sorted(sessions, reverse=bool(turn % 2))
        rounds.append({where: compute(engines[where], sessions[where], prompt) for where in order})
    del rounds[0]  # warms both up
    for what in ("prefill", "decode", "decode_cpu"):
        figures[what] = round(statistics.median(r["host"][what] / r["here"][what] for r in rounds), 3)
    figures["decode_ms"] = round(statistics.median(r["here"]["decode"] for r in rounds) / DECODE_TOKENS * 1e3, 2)
    for engine in engines.values():
        engine.close()
    return figures


def main() -> int:
    """Exit 1 when an engine's decode in a host is over the limit."""
    sys.path.insert(0, str(Path(__file__).parent))
    trips = round_trips()
    slow = False
    for name in ENGINES:
        figures = measure(name)
        slow |= figures["decode_cpu"] > CPU_LIMIT
        shown = {"benchmark": "isolate", "engine": name, "rounds": ROUNDS, "limit": CPU_LIMIT, **trips, **figures}
        print(json.dumps(shown, sort_keys=True), flush=True)
    return int(slow)


if __name__ == "__main__":
    sys.exit(main())
