"""The simplest timeline: one session alone, time only added up."""

from __future__ import annotations

__all__ = ["VirtualTimeline"]


class VirtualTimeline:
    """Nanoseconds from `start_ns`; never goes back."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now = start_ns

    def now_ns(self) -> int:
        return self._now

    def spend(self, ns: int) -> None:
        if ns < 0:
            raise ValueError(f"cannot spend {ns} ns")
        self._now += ns

    def carry(self, ns: int, n_bytes: int) -> None:
        self.spend(ns)
