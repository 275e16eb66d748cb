"""What the sessions of a server did, counted as it is recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvtape.backends.protocol import EventSink
from kvtape.backends.sinks import WatchingSink
from kvtape.planner.events import Event, Op

__all__ = ["COUNTERS", "CountingSink"]

COUNTERS: Mapping[str, str] = {
    "events": "events recorded",
    "sessions": "sessions opened",
    "fatals": "sessions that failed",
    "prompt_tokens": "tokens of prompts",
    "reused_tokens": "tokens of prompts that were resident",
    "forgotten_tokens": "tokens of prompts that had been evicted and were not computed again",
    "prefilled_tokens": "tokens computed for prompts",
    "generated_tokens": "tokens generated",
    "evicted_tokens": "tokens evicted",
    "admitted_tokens": "tokens brought back from the cold store",
    "recomputed_tokens": "tokens computed again that had been resident",
}
"""Name -> what it counts."""


class CountingSink(WatchingSink):
    """Hands everything on, and counts."""

    def __init__(self, sink: EventSink) -> None:
        self.then = sink
        self._counts: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))

    def counts(self) -> dict[str, int]:
        """A copy, by the names of COUNTERS."""
        return dict(self._counts)

    def see(self, event: Event) -> None:
        counts = self._counts
        counts["events"] += 1
        counts["sessions"] += event.op is Op.OPEN
        counts["fatals"] += event.op is Op.FATAL
        counts["prompt_tokens"] += (event.n_tokens or 0) if event.op is Op.PROMPT else 0
        counts["reused_tokens"] += event.reused or 0
        counts["forgotten_tokens"] += event.forgotten or 0
        counts["prefilled_tokens"] += event.physical_prefill_tokens or 0
        counts["generated_tokens"] += event.completion_tokens or 0
        counts["evicted_tokens"] += (event.n_tokens or 0) if event.op is Op.EVICT else 0
        counts["admitted_tokens"] += (event.n_tokens or 0) if event.op is Op.ADMIT else 0
        counts["recomputed_tokens"] += event.recomputed_tokens or 0
