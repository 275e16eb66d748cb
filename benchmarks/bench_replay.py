"""What a judged replay costs an event over the raw engine calls, on llama.cpp and the demo model.

One streaming session is recorded, then carried out again with and without the judge in turn. No limit: prints the
figures of one JSON line.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.registry import open_engine
from kvtape.backends.session import Session
from kvtape.cli.models import demo_model
from kvtape.cli.recording import live_run
from kvtape.planner.events import Op
from kvtape.planner.residency import ResidencyState
from kvtape.planner.specs import parse_policy
from kvtape.replay.covered import covered_weights
from kvtape.replay.lineage import LineageBuilder
from kvtape.replay.performer import Performer
from kvtape.replay.runner import run_session
from kvtape.replay.story import Story, read_story
from kvtape.replay.targets import parse_target
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder

ROUNDS = 3
N_CTX = 512
TEXT = "The cache remembers what the page forgot, and the reader goes on to the next one. "


def record(engine: Engine, path: Path) -> Story:
    """A session of about 1,100 tokens that slides, shifts and admits."""
    clock = MonotonicClock()
    run = live_run({"benchmark": "replay"}, engine, clock)
    recorder = Recorder(path, run, clock=clock)
    backend = engine.open(SessionConfig(n_ctx=N_CTX, chunk=128, cold_budget_tokens=512))
    policy = parse_policy("stream:sink=4,recent=252,positions=rebased")
    with Session(backend, policy, recorder, clock, run_id=run.run_id, session_id="s", content=True) as session:
        session.ensure_prefix((engine.tokenize(TEXT) * 80)[:1000])
        session.admit(session.cold_block_ids[-1])
        session.decode(96, stop_tokens=frozenset())
    recorder.close()
    with open_log(path) as log:
        row = log.sessions(run.run_id)[0]
        return read_story(row, log.events(run.run_id, "s"), log.tokens(run.run_id, "s"))


def raw_seconds(story: Story, engine: Engine) -> float:
    """The same engine calls with nobody looking."""
    began = time.perf_counter()
    backend = engine.open(parse_target("llama").session_config(story.row))
    performer = Performer(backend, LineageBuilder("log", remove_tail=True), frozenset(), story.tokens)
    before = ResidencyState()
    for event, after in zip(story.events, story.states, strict=True):
        if event.op not in (Op.OPEN, Op.CLOSE):
            performer.perform(event, before, after)
        before = after
    backend.close()
    return time.perf_counter() - began


def judged_seconds(story: Story, engine: Engine, weights: Weights) -> float:
    began = time.perf_counter()
    run = run_session(story, parse_target("llama"), engine, weights)
    if run.divergence is not None:
        raise SystemExit(f"the replay diverged: {run.divergence.finding.what}")
    return time.perf_counter() - began


def main() -> int:
    """Exit 0; a replay that diverges is an error."""
    path = demo_model()
    engine, weights = open_engine("llama", path), covered_weights(path)
    with tempfile.TemporaryDirectory() as folder:
        story = record(engine, Path(folder) / "bench.duckdb")
    pairs = [(raw_seconds(story, engine), judged_seconds(story, engine, weights)) for _ in range(ROUNDS)]
    engine.close()
    extra_ms = statistics.median((judged - raw) / len(story.events) * 1000 for raw, judged in pairs)
    figures = {
        "events": len(story.events),
        "extra_ms_per_event": round(extra_ms, 1),
        "ratio": round(statistics.median(judged / raw for raw, judged in pairs), 3),
        "raw_s": round(statistics.median(raw for raw, _ in pairs), 2),
    }
    print(json.dumps({"benchmark": "replay", "rounds": ROUNDS, **figures}, sort_keys=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
