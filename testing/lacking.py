"""What a backend must do about an ability that it does not have: refuse, give the reason, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvtape.backends.errors import UnsupportedOperation
from kvtape.testing.bench import Bench, NotApplicable

__all__ = ["LACKING"]


def _lacks(flag: str, calls: Callable[[Bench], Mapping[str, Callable[[], Any]]]) -> Callable[[Bench], None]:
    def run(bench: Bench) -> None:
        if getattr(bench.backend.capabilities, flag):
            raise NotApplicable(f"{flag} is true; what it promises is executed by its own scenarios")
        bench.feed(bench.draw(12))
        for what, call in calls(bench).items():
            bench.refuses(f"{what} with {flag} false", call, UnsupportedOperation)
        bench.feed(bench.draw(3, 1))

    run.__doc__ = f"Where {flag} is false, what needs it is refused with UnsupportedOperation and nothing changes."
    return run


LACKING: Mapping[str, Callable[[Bench], None]] = {
    "remove_tail": _lacks("remove_tail", lambda b: {"truncate": lambda: b.backend.truncate(9)}),
    "remove_middle": _lacks("remove_middle", lambda b: {"evict": lambda: b.backend.evict(4, 8)}),
    "position_shift": _lacks("position_shift", lambda b: {"shift": lambda: b.backend.shift(0, 12, 4)}),
    "cold_store": _lacks(
        "cold_store",
        lambda b: {
            "export_block": lambda: b.backend.export_block(4, 8),
            "admit": lambda: b.backend.admit(b"", 12, 12),
        },
    ),
    "recompute_range": _lacks("recompute_range", lambda b: {"refill": lambda: b.backend.refill(b.draw(2, 1), 12, 12)}),
    "snapshot_state": _lacks(
        "snapshot_state", lambda b: {"snapshot": b.backend.snapshot, "restore": lambda: b.backend.restore(b"")}
    ),
    "attention_scores": _lacks(
        "attention_scores",
        lambda b: {"score": lambda: b.backend.score(b.draw(1), 12), "take_mass": b.backend.take_mass},
    ),
}
"""By capability."""
