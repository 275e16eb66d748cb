"""Session time inside SimPy time: a session's calls run ahead by themselves, and meet the world only where they must.

Nothing that a session decides depends on the clock, and nothing in the world depends on it between two meetings: the
beginning and the end of a call, and a transfer over the shared link. So a call costs one SimPy event, whatever it
computes, and each transfer one more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import simpy
from greenlet import getcurrent, greenlet

from kvtape.backends.errors import EngineFault, FatalClass
from kvtape.sim.modelled_time import check_time

__all__ = ["Link", "SimTimeline", "SlotTimeline", "slot_failed"]

Wait = Generator[simpy.Event, Any, None]


class Link:
    """A cold-store link: one transfer at a time, first come, first served. `busy_ns` in use, `n_bytes` moved."""

    def __init__(self, env: simpy.Environment, bytes_per_s: int, latency_ns: int) -> None:
        self._gate = simpy.Resource(env)
        self._env = env
        self._bytes_per_s = bytes_per_s
        self._latency_ns = latency_ns
        self.busy_ns = self.n_bytes = 0

    def transfer(self, n_bytes: int) -> Wait:
        with self._gate.request() as mine:
            yield mine
            ns = self._latency_ns + -(-n_bytes * 1_000_000_000 // self._bytes_per_s)
            self.busy_ns += ns
            self.n_bytes += n_bytes
            yield self._env.timeout(ns)


class SimTimeline:
    """A `Timeline` of one conversation. `ahead_ns`: time that was spent and that the world has not lived through."""

    def __init__(self, env: simpy.Environment, link: Link | None = None) -> None:
        self._env = env
        self._link = link
        self._ahead = 0

    @property
    def shares_a_link(self) -> bool:
        return self._link is not None

    def now_ns(self) -> int:
        return int(self._env.now) + self._ahead

    def spend(self, ns: int) -> None:
        if ns < 0:
            raise ValueError(f"cannot spend {ns} ns")
        self._ahead += ns
        check_time(self.now_ns())

    def carry(self, ns: int, n_bytes: int) -> None:
        if self._link is None:
            self.spend(ns)
        else:
            outer = getcurrent().parent
            assert outer is not None
            outer.switch(n_bytes)

    def run(self, call: Callable[[], None]) -> Wait:
        """Carry `call` out in the world: to be driven by a SimPy process. What it raises goes through."""
        inner = greenlet(call)
        asked = inner.switch()
        while not inner.dead:
            yield from self._catch_up()
            assert self._link is not None
            yield from self._link.transfer(asked)
            asked = inner.switch()
        yield from self._catch_up()

    def _catch_up(self) -> Wait:
        ns, self._ahead = self._ahead, 0
        if ns:
            yield self._env.timeout(ns)


class SlotTimeline:
    """A `Timeline` for what is computed on a slot, and a slot can fail: work that would end later than that faults.

    Only work does, in the middle of a session's operation; time that passes between two events is not the slot's.
    """

    def __init__(self, inner: SimTimeline) -> None:
        self._inner = inner
        self._slot = 0
        self._fails_at: int | None = None
        self.failed = False

    def on(self, slot: int, fails_at_ns: int | None) -> None:
        """From now on the work is done on `slot`, which fails at that time, None for never."""
        self._slot, self._fails_at, self.failed = slot, fails_at_ns, False

    def now_ns(self) -> int:
        return self._inner.now_ns()

    def spend(self, ns: int) -> None:
        left = ns if self._fails_at is None else max(0, self._fails_at - self.now_ns())
        self._inner.spend(min(ns, left))
        if ns > left:
            self._fault()

    def carry(self, ns: int, n_bytes: int) -> None:
        if not self._inner.shares_a_link:
            self.spend(ns)
            return
        self._inner.carry(ns, n_bytes)  # seen when the transfer has ended: until then the link is taken
        if self._fails_at is not None and self.now_ns() > self._fails_at:
            self._fault()

    def _fault(self) -> None:
        self.failed = True
        raise EngineFault(FatalClass.DEVICE_LOST, slot_failed(self._slot))


def slot_failed(slot: int) -> str:
    """The cause that the log gives."""
    return f"slot {slot} failed"
