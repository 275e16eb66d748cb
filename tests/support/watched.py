"""Engines whose backends are watched: what was called, what failed, what was freed, and what must never happen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvtape.backends.errors import EngineFault
from kvtape.backends.protocol import Backend, Engine, ModelFacts, SessionConfig
from kvtape.testing.toy import ToyBackend

__all__ = ["OPERATIONS", "ToyEngine", "WatchedBackend", "WatchedEngine"]

OPERATIONS = (
    "prefill",
    "decode_until",
    "truncate",
    "evict",
    "shift",
    "export_block",
    "admit",
    "refill",
    "rebuild",
    "snapshot",
    "restore",
    "score",
    "take_mass",
    "books",
    "witness",
    "kv_bytes",
)
"""Whatever of a backend reaches its native context."""


class WatchedBackend:
    """Passes everything on, and writes down: calls, faults, closes, and uses of a context that is gone or failed."""

    def __init__(self, inner: Backend, violations: list[str]) -> None:
        self.inner, self._violations = inner, violations
        self.calls: list[str] = []
        self.faults: list[EngineFault] = []
        self.closes = 0

    @property
    def dead(self) -> bool:
        return bool(self.closes or self.faults)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.inner, name)
        return self._watched(name, found) if name in OPERATIONS else found

    def _watched(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.dead:
                self._violations.append(f"{name} on a context that {'failed' if self.faults else 'was closed'}")
            self.calls.append(name)
            try:
                return call(*args, **kwargs)
            except EngineFault as fault:
                self.faults.append(fault)
                raise

        return run

    def close(self) -> None:
        self.closes += 1
        if self.closes > 1:
            self._violations.append("a context was freed twice")
        self.inner.close()


class WatchedEngine:
    """An engine that remembers what it opened; `violations` stays empty when all goes well."""

    def __init__(self, inner: Engine, violations: list[str]) -> None:
        self.inner, self._violations = inner, violations
        self.backends: list[WatchedBackend] = []
        self.closes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def open(self, config: SessionConfig) -> WatchedBackend:
        if self.closes:
            self._violations.append("a session was opened on a closed engine")
        backend = WatchedBackend(self.inner.open(config), self._violations)
        self.backends.append(backend)
        return backend

    def close(self) -> None:
        self.closes += 1
        if any(not b.closes for b in self.backends):
            self._violations.append("an engine was closed under a session")
        if self.closes > 1:
            self._violations.append("an engine was closed twice")
        self.inner.close()


class ToyEngine:
    """The toy as an engine: every session a backend of its own."""

    name, version = "toy", "1"

    def __init__(self, fingerprint: str = "toy/1") -> None:
        self.facts = ModelFacts("toy", fingerprint, "toy", 64, 1 << 20, frozenset())

    def tokenize(self, text: str) -> list[int]:
        return [ord(c) % self.facts.n_vocab for c in text]

    def detokenize(self, tokens: Sequence[int]) -> str:
        return " ".join(map(str, tokens))

    def open(self, config: SessionConfig) -> ToyBackend:
        return ToyBackend(config)

    def close(self) -> None:
        pass
