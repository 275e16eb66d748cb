"""What reading attention costs on llama.cpp and the demo model, beside a session that does not.

Three sessions compute the same tokens in turn: without scores, with the engine's callback asked and declining, with
the attention of every query of every layer and head counted. The figures are medians of paired ratios of CPU time, one
thread. Beside them: a probe of 32 tokens over the prompt, as a multiple of computing 32 tokens. No limit: prints one
JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable

from kvtape.backends.llama.engine import LlamaEngine
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import Logits, SessionConfig
from kvtape.cli.models import demo_model

PROMPT_TOKENS = 1024
AGAIN_TOKENS = 128
DECODE_TOKENS = 24
PROBE_TOKENS = 32
ROUNDS = 7
N_CTX = 2048
TEXT = "The cache remembers what the page forgot, and the reader goes on to the next one. "


def seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


def open_sessions(engine: LlamaEngine) -> dict[str, LlamaBackend]:
    """The baseline first."""
    sessions = {
        name: engine.open(SessionConfig(n_ctx=N_CTX, options={"scores": scores}))
        for name, scores in (("off", "off"), ("idle", "on"), ("counting", "on"))
    }
    # Sessions have no such switch: what is left is the callback that declines every node.
    sessions["idle"]._attention = None
    return sessions


def one_round(sessions: dict[str, LlamaBackend], prompt: list[int], turn: int) -> dict[str, tuple[float, float]]:
    """CPU seconds of the prompt's last tokens computed again, and of decoding behind it, by session."""
    names = sorted(sessions)
    order = (*names[turn % 3 :], *names[: turn % 3])
    return {name: compute(sessions[name], prompt) for name in order}


def compute(backend: LlamaBackend, prompt: list[int]) -> tuple[float, float]:
    kept = PROMPT_TOKENS - AGAIN_TOKENS
    backend.truncate(kept)
    logits: list[Logits] = []
    prefill = seconds(lambda: logits.append(backend.prefill(prompt[kept:], kept).logits))
    decode = seconds(
        lambda: backend.decode_until(DECODE_TOKENS, N_CTX, PROMPT_TOKENS, logits[0], lambda row: int(row.argmax()))
    )
    return prefill, decode


def probe_ratio(backend: LlamaBackend, prompt: list[int]) -> float:
    """CPU time of a probe over that of computing as many tokens and taking them back."""
    tokens = prompt[:PROBE_TOKENS]
    backend.truncate(PROMPT_TOKENS)

    def there_and_back() -> None:
        backend.prefill(tokens, PROMPT_TOKENS)
        backend.truncate(PROMPT_TOKENS)

    pairs = [(seconds(lambda: backend.score(tokens, PROMPT_TOKENS)), seconds(there_and_back)) for _ in range(ROUNDS)]
    return statistics.median(probe / plain for probe, plain in pairs)


def main() -> int:
    """Exit 0."""
    engine = LlamaEngine.load(demo_model())
    prompt = (engine.tokenize(TEXT) * 80)[:PROMPT_TOKENS]
    sessions = open_sessions(engine)
    for backend in sessions.values():
        backend.prefill(prompt, 0)
    rounds = [one_round(sessions, prompt, turn) for turn in range(ROUNDS)]
    figures = {
        f"{what}_{name}": round(statistics.median(took[name][i] / took["off"][i] for took in rounds), 3)
        for i, what in enumerate(("prefill", "decode"))
        for name in ("idle", "counting")
    }
    figures["take_ms"] = round(seconds(sessions["counting"].take_mass) * 1000, 2)
    figures["probe"] = round(probe_ratio(sessions["counting"], prompt), 3)
    engine.close()
    print(json.dumps({"benchmark": "scores", "rounds": ROUNDS, **figures}, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
