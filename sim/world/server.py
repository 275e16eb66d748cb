"""The machine: slots that hold contexts, memory that they share, who waits for them, and slots that fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

import simpy

__all__ = ["Server", "Tenant"]


class Tenant(Protocol):
    """A conversation that can hold a slot."""

    name: str
    n_bytes: int

    def displaced(self) -> None:
        """Its slot is needed by another; its cache goes."""

    def lost(self, slot: int) -> None:
        """Its slot failed while it was idle; its cache is gone."""


@dataclass(slots=True)
class _Held:
    """A slot in use or kept."""

    tenant: Tenant
    slot: int


class Server:
    """`n_slots` slots and KV memory. First come, first served; who still holds its slot does not wait.

    `n_tenants` that there are, each in one slot at most. `memory_bytes` None: enough. `failures`: at which time, in
    ns, which slot fails, for good.
    """

    def __init__(
        self,
        env: simpy.Environment,
        n_slots: int,
        n_tenants: int,
        memory_bytes: int | None,
        failures: Mapping[int, int] | None = None,
    ) -> None:
        self._env = env
        self._memory = memory_bytes
        self._failures = dict(failures or {})
        # The lowest that is free is taken: no higher one ever is, however many the machine has.
        self._free = list(range(min(n_slots, n_tenants + len(self._failures))))
        self._dead: set[int] = set()
        self._n_slots = n_slots
        self._held: dict[str, _Held] = {}
        self._waiting: deque[tuple[Tenant, simpy.Event]] = deque()
        self._idle: dict[str, _Held] = {}
        self._used = 0
        self.displaced = 0
        for slot, at_ns in self._failures.items():
            env.process(self._fails(slot, at_ns))

    @property
    def dead(self) -> int:
        """How many slots have failed."""
        return len(self._dead)

    def fits(self, tenant: Tenant) -> bool:
        """Whether the tenant's context fits the memory with nobody else in it."""
        return self._memory is None or tenant.n_bytes <= self._memory

    def acquire(self, tenant: Tenant) -> Generator[simpy.Event, Any, int | None]:
        """Wait for the sole use of a slot: its number, or None where no slot is left and none will be."""
        held = self._held.get(tenant.name)
        if held is not None:
            del self._idle[tenant.name]
            return held.slot
        granted = self._env.event()
        self._waiting.append((tenant, granted))
        self._serve()
        slot: int | None = yield granted
        return slot

    def fails_at(self, slot: int) -> int | None:
        """When the slot will fail, in ns; None: never."""
        return self._failures.get(slot)

    def release(self, tenant: Tenant, *, keep: bool) -> None:
        """Give the slot back; with `keep` the tenant's cache stays in it until somebody needs it."""
        held = self._held[tenant.name]
        if keep and held.slot not in self._dead:
            self._idle[tenant.name] = held  # behind those that are idle longer
        else:
            self._vacate(held)
            if keep:
                tenant.lost(held.slot)
        self._serve()

    def _fails(self, slot: int, at_ns: int) -> Generator[simpy.Event, Any, None]:
        yield self._env.timeout(at_ns)
        self._dead.add(slot)
        if slot in self._free:
            self._free.remove(slot)
            heapify(self._free)
        # Whoever computes on it finds out by itself, and gives it back.
        held = next((h for h in self._idle.values() if h.slot == slot), None)
        if held is not None:
            self._vacate(held)
            held.tenant.lost(slot)
        self._serve()

    def _vacate(self, held: _Held) -> None:
        del self._held[held.tenant.name]
        self._idle.pop(held.tenant.name, None)
        self._used -= held.tenant.n_bytes
        if held.slot not in self._dead:
            heappush(self._free, held.slot)

    def _serve(self) -> None:
        while self._waiting:
            tenant, granted = self._waiting[0]
            if len(self._dead) == self._n_slots:
                self._waiting.popleft()
                granted.succeed(None)
                continue
            if not self._make_room(tenant):
                return
            self._waiting.popleft()
            slot = heappop(self._free)
            self._held[tenant.name] = _Held(tenant, slot)
            self._used += tenant.n_bytes
            granted.succeed(slot)

    def _make_room(self, tenant: Tenant) -> bool:
        """Room for one more, idle caches displaced for it; False, and nothing displaced, when it cannot be had."""
        free, used = len(self._free), self._used
        if self._room(tenant, free, used):
            return True
        leaving: list[_Held] = []
        for held in self._idle.values():
            leaving.append(held)
            used -= held.tenant.n_bytes
            if self._room(tenant, free + len(leaving), used):
                self._displace(leaving)
                return True
        return False

    def _room(self, tenant: Tenant, free: int, used: int) -> bool:
        """Whether `tenant` fits where `free` slots are left beside `used` bytes."""
        return free > 0 and (self._memory is None or used + tenant.n_bytes <= self._memory)

    def _displace(self, leaving: list[_Held]) -> None:
        for held in leaving:
            self._vacate(held)
            self.displaced += 1
            held.tenant.displaced()
