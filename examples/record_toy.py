"""Record two sessions without any engine, on the toy backend: python examples/record_toy.py new.duckdb"""

import sys

from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.rows import RunRow
from kvtape.planner.specs import parse_policy
from kvtape.testing.toy import open_toy
from kvtape.traces.recorder import Recorder


class CountingClock:
    """A microsecond passes with every look at it."""

    ns = 0

    def now_ns(self) -> int:
        self.ns += 1000
        return self.ns


def text(start: int, n: int) -> list[int]:
    """Token ids of a made-up text; two texts that start alike are alike."""
    return [(start + i * i) % 60 for i in range(n)]


def record(log: str) -> None:
    clock, config = CountingClock(), SessionConfig(n_ctx=96, chunk=32, cold_budget_tokens=64)
    about = {"config_digest": "", "config": "{}", "kvtape_version": "0.1.0", "engine_versions": "{}"}
    run = RunRow(run_id="toy-run", kind="live", started_at_ns=clock.now_ns(), **about)
    recorder = Recorder(log, run, clock=clock)
    chat = ("chat", "stream:sink=4,recent=44,block=16", (text(1, 80), text(1, 140), text(1, 140)))
    pinned = ("pinned", "class:budget=64,block=16", (text(1, 80), text(1, 88), text(2, 40)))
    for name, policy, prompts in (chat, pinned):
        session = Session(open_toy(config), parse_policy(policy), recorder, clock, run_id=run.run_id, session_id=name)
        with session:
            for prompt in prompts:
                session.ensure_prefix(prompt)
                session.decode(12)
    recorder.seal()


if __name__ == "__main__":
    record(sys.argv[1]) if len(sys.argv) == 2 else sys.exit(__doc__)
