"""The machine: slots that hold contexts, memory that they share, and who waits for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol

import simpy

__all__ = ["Server", "Tenant"]


class Tenant(Protocol):
    """A conversation that can hold a slot."""

    name: str
    n_bytes: int

    def displaced(self) -> None:
        """Its slot is needed by another; its cache goes."""


@dataclass(slots=True)
class _Held:
    """A slot in use or kept. `since`: serial number of when it was last given back; None while in use."""

    tenant: Tenant
    since: int | None = None


class Server:
    """Slots and KV memory. First come, first served; who still holds its slot does not wait.

    `slots` None: as many as there are tenants. `memory_bytes` None: enough.
    """

    def __init__(self, env: simpy.Environment, slots: int | None, memory_bytes: int | None) -> None:
        self._env = env
        self._slots, self._memory = slots, memory_bytes
        self._held: dict[str, _Held] = {}
        self._waiting: deque[tuple[Tenant, simpy.Event]] = deque()
        self._serial = 0
        self.displaced = 0

    def fits(self, tenant: Tenant) -> bool:
        """Whether the tenant's context fits the memory with nobody else in it."""
        return self._memory is None or tenant.n_bytes <= self._memory

    def acquire(self, tenant: Tenant) -> Generator[simpy.Event, Any, None]:
        """Wait for the sole use of a slot."""
        held = self._held.get(tenant.name)
        if held is not None:
            held.since = None
            return
        granted = self._env.event()
        self._waiting.append((tenant, granted))
        self._serve()
        yield granted

    def release(self, tenant: Tenant, *, keep: bool) -> None:
        """Give the slot back; with `keep` the tenant's cache stays in it until somebody needs it."""
        if keep:
            self._serial += 1
            self._held[tenant.name].since = self._serial
        else:
            del self._held[tenant.name]
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            tenant, granted = self._waiting[0]
            if not self._make_room(tenant):
                return
            self._waiting.popleft()
            self._held[tenant.name] = _Held(tenant)
            granted.succeed()

    def _make_room(self, tenant: Tenant) -> bool:
        """Room for one more, idle caches displaced for it; False, and nothing displaced, when it cannot be had."""
        n, used = len(self._held), sum(h.tenant.n_bytes for h in self._held.values())
        if self._room(tenant, n, used):
            return True
        leaving = []
        for held in sorted((h for h in self._held.values() if h.since is not None), key=_idle_since):
            leaving.append(held)
            used -= held.tenant.n_bytes
            if self._room(tenant, n - len(leaving), used):
                self._displace(leaving)
                return True
        return False

    def _room(self, tenant: Tenant, n: int, used: int) -> bool:
        """Whether `tenant` fits beside `n` slots that take `used` bytes."""
        return (self._slots is None or n < self._slots) and (
            self._memory is None or used + tenant.n_bytes <= self._memory
        )

    def _displace(self, leaving: list[_Held]) -> None:
        for held in leaving:
            del self._held[held.tenant.name]
            self.displaced += 1
            held.tenant.displaced()


def _idle_since(held: _Held) -> int:
    return held.since or 0
