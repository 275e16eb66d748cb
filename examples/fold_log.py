"""Every state of a session, from its events alone: python examples/fold_log.py demo-out/demo.duckdb"""

import sys

from kvtape.planner.residency import RESIDENCY_OPS, ResidencyState, apply, check_event
from kvtape.traces.reader import open_log

if len(sys.argv) != 2:
    sys.exit(__doc__)

with open_log(sys.argv[1]) as log:
    run_id = log.default_run().run_id
    for row in log.sessions(run_id):
        print(f"session {row.session_id} on {row.backend}, policy {row.policy}")
        state = ResidencyState()
        for event in log.events(run_id, row.session_id):
            state = apply(state, event)
            check_event(state, event)
            if event.op in RESIDENCY_OPS:
                print(f"{event.seq:5} {event.op:9} {state.resident_tokens:5} resident:", *state.resident)
