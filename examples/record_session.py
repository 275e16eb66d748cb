"""Record a session from your own program: python examples/record_session.py MODEL.gguf TEXT.txt new.duckdb"""

import json
import sys
from pathlib import Path

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.backends.session import Session
from kvtape.planner.rows import RunRow
from kvtape.planner.specs import parse_policy
from kvtape.traces.recorder import Recorder

if len(sys.argv) != 4:
    sys.exit(__doc__)

model, text, log = sys.argv[1:]
engine = open_engine("llama", model)
clock = MonotonicClock()
run = RunRow(
    run_id="my-run",
    kind="live",
    config_digest="",
    config="{}",
    kvtape_version="0.1.0",
    engine_versions=json.dumps({engine.name: engine.version}),
    started_at_ns=clock.now_ns(),
)
recorder = Recorder(log, run, clock=clock)
backend = engine.open(SessionConfig(n_ctx=512))
policy = parse_policy("stream:sink=4,recent=252")
with Session(backend, policy, recorder, clock, run_id=run.run_id, session_id="s0", content=True) as session:
    status = session.ensure_prefix(engine.tokenize(Path(text).read_text(encoding="utf-8")))
    result = session.decode(32)
recorder.seal()
print(f"prefilled {status.prefilled}, said {engine.detokenize(result.tokens)!r}, resident:", *session.resident)
engine.close()
