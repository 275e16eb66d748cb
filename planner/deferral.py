"""Deferred prefill, as a log tells it: a prompt that says so waits, and later prefills compute it.

Its event bears the turn's counters itself. What a decode computed of it bears the deferred counters.
"""

from __future__ import annotations

from typing import Final

from kvtape.planner.events import Event, Op

__all__ = ["DEFERRED", "DEFERRED_PROMPT", "waits"]

DEFERRED: Final = '{"deferred":true}'
"""`detail` of a prompt whose tokens are computed later."""

DEFERRED_PROMPT: Final = f"op = 'prompt' AND detail = '{DEFERRED}'"
"""The same as a condition on rows of `events`, in SQL."""


def waits(event: Event) -> bool:
    """Whether the event is a prompt whose tokens are computed later, if they are not replaced before."""
    return event.op is Op.PROMPT and event.detail == DEFERRED
