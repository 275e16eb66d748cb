"""A policy of your own: keep every other block, newest first, that fits the budget.

kvtape record --policy policy:every_other,budget=64,block=4 ... (with this folder on PYTHONPATH)
"""

from collections.abc import Iterator

from kvtape.planner.user_policy import PolicyView


def every_other(view: PolicyView) -> Iterator[int]:
    """The ids of the blocks to keep. A pure function: no clock, no chance, nothing remembered."""
    yield from view.protected
    room = view.budget - view.protected_tokens
    for block in view.candidates[::-2]:
        room -= block.n_tokens
        if room < 0:
            return
        yield block.block_id
