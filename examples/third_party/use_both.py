"""Your policy on your backend, through the real Session: python examples/third_party/use_both.py"""

from backend import open_backend

from kvtape.backends.clock import ManualClock
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.events import Op
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink

policy = parse_policy("policy:every_other,budget=24,recent=4,block=4")
sink = ListSink()
mine = open_backend(SessionConfig(n_ctx=32, chunk=8))
with Session(mine, policy, sink, ManualClock(), run_id="r", session_id="s", allow_recompute=True) as session:
    session.ensure_prefix([i % 30 for i in range(50)])
    session.decode(5)
    agree = mine.books() == fold(sink.events).layout
    print("resident", *session.resident)

for plan in sink.plans[:1]:
    print(f"first plan: {plan.total_tokens} tokens, keeps {plan.hot_tokens} of a budget of {plan.budget_tokens}")
print(
    sum(e.op is Op.EVICT for e in sink.events), "evicts, all by", *{str(e.way) for e in sink.events if e.op is Op.EVICT}
)
print("fold and books agree" if agree else "fold and books differ")
