"""Where a needle stands, in tape positions: regions follow from what `stream` keeps, one meaning for all policies.

    0          sink                                     length - recent     length
    |-- sink --|------------------ middle ------------------|---- recent ----|

`sink` and `recent` regions are what every `stream` policy of the evaluation keeps (the smallest of their spans), the
middle is what none of them keeps (outside the largest). Other policies are asked about the same prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.errors import UsageError
from kvtape.planner.grammar import nearest

__all__ = ["REGIONS", "Regions", "regions_of"]

REGIONS = ("middle", "recent", "sink")


@dataclass(frozen=True, slots=True)
class Regions:
    """Spans in tokens. A needle lies in one region when all of it does."""

    sink: int
    recent: int
    sink_most: int
    recent_most: int

    def bounds(self, region: str, length: int) -> tuple[int, int]:
        """`[start, stop)` of the region on a tape of `length`. Raises UsageError for an unknown one."""
        if region not in REGIONS:
            raise UsageError(f"unknown region {region!r}{nearest(region, REGIONS)} allowed: {', '.join(REGIONS)}")
        if region == "sink":
            return 0, min(self.sink, length)
        if region == "recent":
            return max(0, length - self.recent), length
        return self.sink_most, max(self.sink_most, length - self.recent_most)

    def text(self) -> str:
        """How the regions were drawn, for the report."""
        return (
            f"sink: within the first {self.sink} tokens; recent: within the last {self.recent}; "
            f"middle: outside the first {self.sink_most} and the last {self.recent_most}"
        )


def regions_of(spans: Sequence[tuple[int, int]]) -> Regions:
    """From the (sink, recent) spans of the `stream` policies, at least one."""
    sinks, recents = [s for s, _ in spans], [r for _, r in spans]
    return Regions(min(sinks), min(recents), max(sinks), max(recents))
