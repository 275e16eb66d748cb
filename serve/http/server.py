"""Running the application under uvicorn: one process, one loop, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvtape.serve.http.access import Access
from kvtape.serve.http.app import make_app
from kvtape.serve.http.gate import BodyLimits
from kvtape.serve.requests import Service

__all__ = ["Access", "Running", "serve_forever"]

_HEADERS_S = 10.0
"""Seconds in which a connection must have sent the headers of its first request."""

_KEEP_ALIVE_S = 30
_MOST_CONNECTIONS = 512


def serve_forever(
    service: Service,
    access: Access,
    *,
    version: str,
    listening: Callable[[str], None] = lambda url: None,
    limits: BodyLimits | None = None,
) -> None:
    """Until SIGINT or SIGTERM, or until the service takes nothing more; then what runs is finished.

    A second signal ends at once. `listening` is told the address once connections are taken. Must run in the main
    thread for the signals. Raises EnvironmentProblem where the address cannot be had.
    """
    asyncio.run(Running(service, access, version=version, listening=listening, limits=limits).run())


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
        headers_s: float = _HEADERS_S,
    ) -> None:
        self._listener = access.listen()
        config = uvicorn.Config(
            make_app(service, access, version=version, limits=limits),
            http=partial(_Protocol, headers_s),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            limit_concurrency=_MOST_CONNECTIONS,
            backlog=128,
        )
        self._server = _Server(config, service, lambda: listening(_url(self._listener)))

    async def run(self) -> None:
        await self._server.serve(sockets=[self._listener])

    def stop(self) -> None:
        self._server.should_exit = True


class _Server(uvicorn.Server):
    """Takes signals without raising them again at the end, and ends the service before the connections."""

    def __init__(self, config: uvicorn.Config, service: Service, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._service = service
        self._tell_started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: whoever runs it ends it
            for number in numbers:
                loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in numbers:
                with contextlib.suppress(ValueError, RuntimeError):
                    loop.remove_signal_handler(number)

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
        await super().shutdown(sockets)
        await ending


class _Protocol(H11Protocol):
    """Closes a connection that is slow to say what it wants."""

    def __init__(self, headers_s: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._headers_s = headers_s

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._headers_s, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)

    def _give_up(self) -> None:
        if self.cycle is None and not self.transport.is_closing():
            self.transport.close()


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
