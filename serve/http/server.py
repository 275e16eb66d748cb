"""Running the application under uvicorn: one process, one loop, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn

from kvtape.serve.http.access import Access
from kvtape.serve.http.app import make_app
from kvtape.serve.http.connection import Connection, Patience
from kvtape.serve.http.gate import BodyLimits
from kvtape.serve.requests import Service

__all__ = ["Access", "Running", "serve_forever", "signals_given_back"]

_KEEP_ALIVE_S = 30

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_LAST_WORDS_S = 2.0
"""Seconds in which those whose answers were cancelled are told so, before the loop ends under them."""


def serve_forever(
    service: Service,
    access: Access,
    *,
    version: str,
    listening: Callable[[str], None] = lambda url: None,
    limits: BodyLimits | None = None,
    listener: socket.socket | None = None,
) -> None:
    """Until SIGINT or SIGTERM, or until the service takes nothing more; then what runs is finished.

    A second signal cancels what runs. Afterwards both signals do nothing, since what was served is yet to be sealed:
    the caller gives them back (`signals_given_back`). `listening` is told the address once connections are taken;
    `listener` is that of `access`, where it was made before. Must run in the main thread for the signals. Raises
    EnvironmentProblem where the address cannot be had.
    """
    running = Running(service, access, version=version, listening=listening, limits=limits, listener=listener)
    # It warns of what is written to a client that has just left.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    asyncio.run(running.run())


@contextlib.contextmanager
def signals_given_back() -> Iterator[None]:
    """Around `serve_forever` and all that is to be finished after it: what the signals did before, they do again."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not Python's to give back
                signal.signal(number, handler)


class Running:
    """One server; `stop` may be called from any thread. Raises as `serve_forever`."""

    def __init__(
        self,
        service: Service,
        access: Access,
        *,
        version: str,
        listening: Callable[[str], None] = lambda url: None,
        limits: BodyLimits | None = None,
        patience: Patience | None = None,
        listener: socket.socket | None = None,
    ) -> None:
        self._listener = listener or access.listen()
        patience = patience or Patience()
        config = uvicorn.Config(
            make_app(service, access, version=version, limits=limits),
            http=partial(Connection, patience),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=128,
        )
        self._server = _Server(config, service, lambda: listening(_url(self._listener)), patience.last_s)

    async def run(self) -> None:
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Takes signals without raising them again at the end, and ends the service before the connections."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None], last_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._tell_started = started
        self._last_s = last_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Not the loop's handlers: they go with it, and a signal while the log is being sealed would end the process.
        _handle(self.handle_exit)
        try:
            yield
        finally:
            _handle(_ignore)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell_started()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or not self._service.status().ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        ending = asyncio.create_task(self._service.close())
        connections = asyncio.create_task(super().shutdown(sockets))
        while not ending.done():
            if self.force_exit:
                self._service.hurry()
            await asyncio.wait([ending], timeout=0.1)
        await ending
        # What is still open waits for its client, who may take for ever.
        await asyncio.wait([connections], timeout=self._last_s)
        self.force_exit = True
        await connections
        if self.server_state.tasks:
            await asyncio.wait(set(self.server_state.tasks), timeout=_LAST_WORDS_S)


def _handle(handler: Callable[[int, Any], None]) -> None:
    with contextlib.suppress(ValueError):  # not the main thread: whoever runs it ends it
        for number in _SIGNALS:
            signal.signal(number, handler)


def _ignore(sig: int, frame: Any) -> None:
    """Not SIG_IGN, which processes that are started would inherit."""


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
