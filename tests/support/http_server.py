"""A real uvicorn around a service, in a thread, on a free port of loopback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvtape.serve.http.access import Access
from kvtape.serve.http.connection import Patience
from kvtape.serve.http.gate import BodyLimits
from kvtape.serve.http.server import Running
from kvtape.serve.requests import Service

__all__ = ["served"]


@contextmanager
def served(
    service: Service,
    *,
    access: Access | None = None,
    limits: BodyLimits | None = None,
    patience: Patience | None = None,
) -> Iterator[str]:
    """The server's address; the service is closed with it."""
    told: list[str] = []
    up = threading.Event()

    def listening(url: str) -> None:
        told.append(url)
        up.set()

    server = Running(
        service,
        access or Access("127.0.0.1", 0),
        version="0",
        listening=listening,
        limits=limits,
        patience=patience,
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.run()), name="http")
    thread.start()
    try:
        assert up.wait(20)
        yield told[0]
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()
