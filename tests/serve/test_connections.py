"""What comes over a socket that is not what a well-meant client sends."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from kvtape.serve.http.access import Access
from kvtape.serve.http.connection import Patience
from kvtape.testing.sink import ListSink
from support.http_server import served
from support.served import tiny_service

PATIENCE = Patience(headers_s=0.4, stall_s=0.4, connections=20)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_service(slots=2) as service, served(service, patience=PATIENCE) as address:
        yield address


def connected(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)


def all_of(sock: socket.socket) -> bytes:
    said = b""
    while got := sock.recv(1 << 16):
        said += got
    return said


def body_of(answer: bytes) -> dict[str, object]:
    found: dict[str, object] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return found


@pytest.mark.parametrize(
    ("raw", "status", "code"),
    [
        (b"nonsense\r\n\r\n", 400, "invalid_request"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "invalid_request"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n", 400, "invalid_request"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad name: x\r\n\r\n", 400, "invalid_request"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 66_000 + b"\r\n\r\n", 400, "invalid_request"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 200 + b"\r\n", 400, "invalid_request"),
        (
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGE",
            400,
            "invalid_request",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
            400,
            "invalid_request",
        ),
        (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n",
            413,
            "body_too_large",
        ),
        (b"GET /health HTTP/1.0\r\n\r\n", 403, "wrong_host"),
        (b"GET /health HTTP/1.1\r\nHost: localhost.evil.example\r\nConnection: close\r\n\r\n", 403, "wrong_host"),
        (b"GET /health HTTP/1.1\r\nHost: 127.0.0.1.evil:80\r\nConnection: close\r\n\r\n", 403, "wrong_host"),
    ],
    ids=[
        "nonsense",
        "no_host",
        "two_hosts",
        "bad_name",
        "long_header",
        "many_headers",
        "two_framings",
        "two_lengths",
        "huge",
        "http_1_0_no_host",
        "longer_host",
        "longer_address",
    ],
)
def test_what_is_no_request_is_refused_in_the_one_shape(url: str, raw: bytes, status: int, code: str) -> None:
    with connected(url) as sock:
        sock.sendall(raw[:65_000])
        if raw[65_000:]:  # a connection that is closed on unread data is reset
            time.sleep(0.1)
            sock.sendall(raw[65_000:])
        answer = all_of(sock)
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer[:100]
    assert answer.count(b"HTTP/1.1 ") == 1
    assert body_of(answer)["code"] == code


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]", "[::1]:80"])
def test_names_of_this_machine(url: str, host: str) -> None:
    assert httpx.get(f"{url}/health", headers={"Host": host}).status_code == 200


def test_http_1_0_and_requests_sent_ahead(url: str) -> None:
    with connected(url) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert all_of(sock).startswith(b"HTTP/1.1 200 ")
    one = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connected(url) as sock:
        sock.sendall(one * 3 + b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert all_of(sock).count(b"HTTP/1.1 200 ") == 4


def test_a_second_request_that_is_slow_to_come_is_given_up(url: str) -> None:
    with connected(url) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        said = b""
        while not said.endswith(b"}"):
            said += sock.recv(4096)
        sock.sendall(b"GET /health HT")
        began = time.monotonic()
        assert sock.recv(100) == b""
        assert time.monotonic() - began < 5


def test_connections_too_many_are_told_so(url: str) -> None:
    with ExitStack() as open_ones:
        held = [open_ones.enter_context(connected(url)) for _ in range(PATIENCE.connections)]
        time.sleep(0.05)
        with connected(url) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answer = all_of(sock)
        assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"Retry-After: 1\r\n" in answer
        assert body_of(answer)["code"] == "too_many_requests"
        assert len(held) == PATIENCE.connections
    until = time.monotonic() + 5
    while time.monotonic() < until and httpx.get(f"{url}/health").status_code != 200:
        time.sleep(0.05)
    assert httpx.get(f"{url}/health").status_code == 200


def test_a_client_who_never_reads_ends_its_turn() -> None:
    """Its answer fills the buffers of both ends; then the connection is broken, and the turn ends with it."""
    sink = ListSink()
    with tiny_service(n_ctx=8192, sink=sink) as service, served(service, patience=PATIENCE) as url:
        body = json.dumps(
            {"model": "tiny", "prompt": [7] * 9, "max_tokens": 8000, "temperature": 0, "stream": True, "logprobs": 20}
        ).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(30)
            sock.connect((urlsplit(url).hostname, urlsplit(url).port))
            sock.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until = time.monotonic() + 30
            while not service.status().running and time.monotonic() < until:
                time.sleep(0.01)
            while service.status().running and time.monotonic() < until:
                time.sleep(0.02)
            assert service.status().running == 0
    assert 0 < sum(e.completion_tokens or 0 for e in sink.events) < 8000


def test_a_client_who_never_sends_its_body_does_not_keep_the_server_from_its_end() -> None:
    patience = replace(PATIENCE, last_s=0.2)
    with ExitStack() as stack:
        service = stack.enter_context(tiny_service())
        ending = stack.enter_context(ExitStack())
        sock = stack.enter_context(connected(ending.enter_context(served(service, patience=patience))))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.1)
        began = time.monotonic()
        ending.close()  # a body has 30 s to arrive
        assert time.monotonic() - began < 10


def test_keys_are_bytes_and_one_header(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("schlüssel-für-alle\nplain-key-one\n", encoding="utf-8")
    file.chmod(0o600)
    with tiny_service() as service, served(service, access=Access.read("127.0.0.1", 0, file)) as url:

        def status(*keys: bytes) -> int:
            headers = [(b"Authorization", b"Bearer " + key) for key in keys]
            return httpx.get(f"{url}/v1/models", headers=headers).status_code

        assert status("schlüssel-für-alle".encode()) == 200
        assert status(b"plain-key-one") == 200
        assert status("schlüssel-für-alle".encode("latin-1")) == 401
        assert status(b"\xff\xfe\xfd" * 5) == 401
        assert status(b"x" * 30_000) == 401
        assert status(b"plain-key-one", b"plain-key-one") == 401
        assert status(b"wrong-key", b"plain-key-one") == 401
        assert status() == 401


def test_ipv6() -> None:
    with tiny_service() as service, served(service, access=Access("::1", 0)) as url:
        assert url.startswith("http://[::1]:")
        assert httpx.get(f"{url}/health").status_code == 200


def test_refusals_are_counted(url: str) -> None:
    def count(code: str) -> float:
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        start = f'kvtape:failed_requests_total{{code="{code}",'
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(start))

    before = count("wrong_host"), count("not_found"), count("method_not_allowed")
    httpx.get(f"{url}/health", headers={"Host": "evil"})
    httpx.get(f"{url}/nowhere")
    httpx.delete(f"{url}/health")
    assert (count("wrong_host"), count("not_found"), count("method_not_allowed")) == tuple(n + 1 for n in before)
