"""An engine in a host process: the same `protocol.Engine` as the one it holds."""

from __future__ import annotations

import contextlib
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType

from kvtape.backends.errors import EngineFault, SessionClosed, UsageError
from kvtape.backends.isolated.backend import IsolatedBackend
from kvtape.backends.isolated.channel import Channel
from kvtape.backends.isolated.opened import Opened
from kvtape.backends.isolated.process import HostProcess, Limits
from kvtape.backends.protocol import ModelFacts, SessionConfig

__all__ = ["REGISTRY", "HostKeeper", "IsolatedEngine", "open_isolated"]

REGISTRY = "kvtape.backends.registry:open_engine"
"""How a host loads an engine: `module:function` with the arguments of `registry.open_engine`."""


def open_isolated(
    name: str,
    model_path: str | Path,
    options: Mapping[str, str] | None = None,
    *,
    limits: Limits | None = None,
    keeper: HostKeeper | None = None,
    loader: str = REGISTRY,
) -> IsolatedEngine:
    """As `registry.open_engine`, in a host process of its own, or in that of `keeper`, which outlives the engine.

    Raises what the loader raises; EnvironmentProblem when no host starts; EngineFault device_lost when loading kills
    it.
    """
    if keeper is not None and limits is not None:
        raise UsageError("limits belong to the keeper where one is given")
    own = keeper is None
    keeper = keeper or HostKeeper(limits)
    try:
        return IsolatedEngine(keeper, own, loader, name, model_path, options or {})
    except BaseException:
        if own:
            keeper.close()
        raise


class HostKeeper:
    """Keeps one host warm for engines that come one after the other or stand side by side.

    A host that died is replaced when an engine is next used. What kills a host takes every engine on it along.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._host: HostProcess | None = None
        self._channel: Channel | None = None
        self._closed = False
        self.started = 0
        """Hosts so far."""

    @property
    def pid(self) -> int | None:
        """Of the living host."""
        host = self._host
        return host.pid if host is not None and host.alive else None

    def host(self) -> tuple[HostProcess, Channel]:
        """The living host and the channel of its engines. Starts one when there is none."""
        with self._lock:
            if self._closed:
                raise SessionClosed("the engine host was closed")
            if self._host is None or self._channel is None or not self._channel.usable or not self._host.alive:
                self._drop()
                self._host = HostProcess(self._limits)
                self._channel = Channel(self._host.control, self._host, 0, self._limits.load, lock=self._host.calls)
                self.started += 1
            return self._host, self._channel

    def kill(self) -> None:
        """End the host at once, whatever it computes; it is replaced as one that died. From any thread."""
        host = self._host
        if host is not None:
            host.kill()

    def close(self) -> None:
        """End the host. Idempotent."""
        with self._lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        if self._host is None or self._channel is None:
            return
        # A call that was interrupted may still be running there, and nothing of this host is wanted any more.
        if not self._channel.usable:
            self._host.kill()
        self._host.close()
        self._host = self._channel = None


class IsolatedEngine:
    """See `protocol.Engine`. It outlives its host: after a crash the next session opens on a new one, with the same
    model loaded again. Sessions do not: those of a dead host stay lost.
    """

    def __init__(
        self, keeper: HostKeeper, own: bool, loader: str, name: str, model_path: str | Path, options: Mapping[str, str]
    ) -> None:
        self._keeper, self._own = keeper, own
        self._path = str(Path(model_path).absolute())
        self._load = [loader, name, dict(options)]
        self._lock = threading.Lock()
        self._sessions: weakref.WeakSet[IsolatedBackend] = weakref.WeakSet()
        self._closed = False
        self._host, self._channel = keeper.host()
        self._number = self._host.next_number()
        loaded = self._channel.call(dict, "load", [self._number, *self._load, str(model_path)])
        self.name: str = loaded["name"]
        self.version: str = loaded["version"]
        self.facts: ModelFacts = loaded["facts"]

    @property
    def host_pid(self) -> int | None:
        """Of the living host; None when it has died and no new one was needed yet."""
        return self._keeper.pid

    @property
    def hosts_started(self) -> int:
        """1, and one more after each crash that was followed by a use."""
        return self._keeper.started

    def tokenize(self, text: str) -> list[int]:
        number, channel, _ = self._loaded()
        return channel.call(list, "tokenize", [number, text])

    def detokenize(self, tokens: Sequence[int]) -> str:
        number, channel, _ = self._loaded()
        return channel.call(str, "detokenize", [number, tokens])

    def open(self, config: SessionConfig) -> IsolatedBackend:
        """A session in the host. Raises what the engine raises, and EngineFault device_lost when opening kills the
        host."""
        number, channel, host = self._loaded()
        session = host.next_number()
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                opened = channel.call(Opened, "open", [number, session, config], passing=theirs)
        except BaseException:
            ours.close()
            raise
        backend = IsolatedBackend(Channel(ours, host, session, host.limits.answer), opened)
        self._sessions.add(backend)
        return backend

    def abandon(self) -> None:
        """Kill the host, whatever it computes: calls that wait for it end with EngineFault device_lost."""
        self._keeper.kill()

    def close(self) -> None:
        """Close every session, free the model, and end the host when it is the engine's own. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            for session in list(self._sessions):
                session.close()
            if not self._own and self._host.alive and self._channel.usable:
                with contextlib.suppress(EngineFault):  # the host died meanwhile, and the model with it
                    self._channel.call(NoneType, "unload", [self._number])
        finally:
            if self._own:
                self._keeper.close()

    def _loaded(self) -> tuple[int, Channel, HostProcess]:
        """The model on a living host: loaded again where the last one died."""
        with self._lock:
            if self._closed:
                raise SessionClosed("the engine was closed")
            host, channel = self._keeper.host()
            if host is not self._host:
                number = host.next_number()
                loaded = channel.call(dict, "load", [number, *self._load, self._path])
                if loaded["facts"].fingerprint != self.facts.fingerprint:
                    raise UsageError(f"{self._path}: another model than when the engine was opened; open it anew")
                self._host, self._channel, self._number = host, channel, number
            return self._number, self._channel, self._host
