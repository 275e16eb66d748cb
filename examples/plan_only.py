"""What would a policy keep? Pure planner, no engine: python examples/plan_only.py stream:sink=4,recent=60 200"""

import sys

from kvtape.planner.blocks import PromptSegment, segments_to_blocks
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.specs import parse_policy

if len(sys.argv) != 3:
    sys.exit(__doc__)

policy = parse_policy(sys.argv[1])
tokens = int(sys.argv[2])

prompt = [
    PromptSegment(kind="system", tokens=tuple(range(16))),
    PromptSegment(kind="user", tokens=tuple(range(16, tokens))),
]
blocks = segments_to_blocks(prompt, block=policy.block)
plan = policy.plan(blocks, budget=policy.limit(tokens), capabilities=Capabilities(remove_middle=True))

if plan is None:
    print(f"{policy.canonical} never evicts")
else:
    print(f"{policy.canonical}: keeps {plan.hot} of {plan.total} tokens")
    print("keep ", *plan.keep)
    print("evict", *(f"[{ref.start}, {ref.stop})" for ref in plan.evict))
