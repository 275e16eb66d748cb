"""What a session said of itself when it opened, beside its row: the `detail` of its open event, as JSON.

A session says there what it was asked for beyond the ordinary: a precision that is a knob, deferred prefill,
speculation. What is not said was not asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from kvtape.planner.events import Event, Op

__all__ = ["Opening", "opening_of"]


@dataclass(frozen=True, slots=True)
class Opening:
    """`precision`: the knob as text, None for a base precision; `certified`: whether a passing row let it through, None
    where it is no knob. `speculation`: its spec as text.
    """

    precision: str | None = None
    certified: bool | None = None
    defer_prefill: bool = False
    speculation: str | None = None

    def detail(self) -> str | None:
        """For the open event; None where nothing was asked for."""
        said: dict[str, object] = {}
        if self.precision is not None:
            said |= {"precision": self.precision, "certified": bool(self.certified)}
        if self.defer_prefill:
            said["defer_prefill"] = True
        if self.speculation is not None:
            said["speculation"] = self.speculation
        return json.dumps(said, sort_keys=True) if said else None


def opening_of(events: Iterable[Event]) -> Opening:
    """What the open event among `events` says; nothing asked for where there is none, or it says nothing readable."""
    for event in events:
        if event.op is Op.OPEN:
            return _read(event.detail)
    return Opening()


def _read(detail: str | None) -> Opening:
    try:
        said = json.loads(detail or "{}")
    except ValueError:
        return Opening()
    if not isinstance(said, dict):
        return Opening()
    precision, certified = said.get("precision"), said.get("certified")
    speculation = said.get("speculation")
    return Opening(
        precision=precision if isinstance(precision, str) else None,
        certified=certified if isinstance(certified, bool) else None,
        defer_prefill=said.get("defer_prefill") is True,
        speculation=speculation if isinstance(speculation, str) else None,
    )
