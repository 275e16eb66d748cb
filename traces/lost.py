"""The `lost` event: stands in the place of events that were dropped because the queue was full."""

from __future__ import annotations

import json

from kvtape.planner.events import Event, Op

__all__ = ["lost_detail", "lost_events"]


def lost_detail(events: int) -> str:
    """`detail` of a lost event: its seq is that of the first dropped event, the next one's is `events` later."""
    return json.dumps({"events": events}, separators=(",", ":"))


def lost_events(event: Event) -> int:
    """How many events this one stands for; 0 when it is not a lost event."""
    if event.op != Op.LOST:
        return 0
    try:
        return max(1, int(json.loads(event.detail or "")["events"]))
    except (ValueError, TypeError, KeyError):
        return 1
