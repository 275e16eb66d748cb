"""`kvtape ffn-server` as a process that tests kill or as a thread, and a socket that answers whatever a test wants."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.remote.server import FfnServer

__all__ = ["FfnHost", "scripted_answers", "served", "serving"]


class FfnHost:
    """A server process. `port` 0 takes a free one; started again, it listens where it did."""

    def __init__(self, model: Path, port: int = 0) -> None:
        self._model = model
        self.info: dict[str, object] = {}
        self.start(port)

    def start(self, port: int | None = None) -> None:
        place = self.port if port is None else port
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvtape.cli", "ffn-server", "--model", self._model, "--port", str(place), "--json"],
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.info = json.loads(self._process.stdout.readline())

    @property
    def url(self) -> str:
        return str(self.info["url"])

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def interrupt(self) -> int:
        """Ctrl-C: the exit code."""
        self._process.send_signal(2)
        code = self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return code


@contextmanager
def serving(model: Path) -> Iterator[FfnHost]:
    host = FfnHost(model)
    try:
        yield host
    finally:
        host.kill()


@contextmanager
def served(model: Weights, **options: Any) -> Iterator[FfnServer]:
    """A server in a thread of this process, with `options` of `FfnServer`."""
    with FfnServer(model, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def scripted_answers(answers: list[bytes]) -> Iterator[str]:
    """The url of a socket that reads one request a time and answers it with the next of `answers`, then hangs up."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for data in answers:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                _read_request(connection)
                connection.sendall(data)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def _read_request(connection: socket.socket) -> None:
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < int(lengths[0] if lengths else 0):
        body += connection.recv(65536)
