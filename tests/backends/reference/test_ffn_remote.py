"""Feed-forward layers at a server: the same bits, a server that is killed, answers that cannot be used."""

from __future__ import annotations

import http.client
import json
import socket
import struct
import threading
import zlib
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import parse_engine
from kvtape.backends.reference.errors import BackendFailure, BackendUnavailable, ExecutionRefused
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.remote.ffn_remote import RemoteFfn
from kvtape.backends.reference.remote.frames import HEADER_BYTES, MAX_ROWS, FfnFrame, FrameError, model_key
from kvtape.backends.reference.remote.http_calls import Retry
from kvtape.backends.reference.remote.server import FfnServer
from support.command import kvtape_process
from support.ffn_host import FfnHost, scripted_answers, served, serving
from support.llama_tiny import model_file
from support.reference import SHAPES, kv_engine, play, text, weights

QUICK = Retry(attempts=3, timeout_s=5.0, wait_s=0.01)
ENGINES = ["no-cache", "standard", "standard:window=16", "tq4"]


def _silent(seconds: float) -> None:
    """Instead of waiting."""


@pytest.fixture(scope="module")
def host() -> Iterator[FfnHost]:
    with serving(model_file(**SHAPES["llama"])) as host:
        yield host


@pytest.mark.parametrize("spec", ENGINES)
def test_remote_layers_are_local_ones_to_the_bit(spec: str, host: FfnHost) -> None:
    """Engine by engine, every step, and from another process."""
    model, prompt = weights("llama"), text(40)
    local = play(spec, model, prompt, 6)
    engine, remote = kv_engine(spec), RemoteFfn(host.url, model)
    hidden = [engine.prefill(model, remote, prompt)]
    hidden += [engine.decode_step(model, remote, token) for token in local.tokens]
    np.testing.assert_array_equal(np.concatenate(hidden), local.hidden)
    remote.close()


def test_the_router_may_change_between_any_two_calls(host: FfnHost) -> None:
    model = weights("llama")
    tokens = play("standard", model, text(9), 6).tokens
    harness = Harness(parse_engine("standard"), model)
    here, there = harness.router, RemoteFfn(host.url, model)
    seen = []
    for i, logits in enumerate(harness.forced(text(9), tokens)):
        harness.router = there if i % 2 else here
        seen.append(int(logits.argmax()))
    assert seen == tokens
    assert (here.name, there.name) == ("local", f"remote {host.url}")


def test_a_server_killed_in_the_middle_is_an_error_that_can_be_outlived() -> None:
    """A typed error; the state is that before the step; the same token again, once the server is back."""
    model, prompt = weights("llama"), text(20)
    undisturbed = [play(spec, model, prompt, 4) for spec in ENGINES]
    with serving(model_file(**SHAPES["llama"])) as host:
        remote = RemoteFfn(host.url, model, QUICK)
        engines = [kv_engine(spec) for spec in ENGINES]
        for engine, run in zip(engines, undisturbed, strict=True):
            engine.prefill(model, remote, prompt)
            engine.decode_step(model, remote, run.tokens[0])
        host.kill()
        for engine, run in zip(engines, undisturbed, strict=True):
            before = (engine.memory(), engine.handle(), dict(engine.stage_summary()))
            with pytest.raises(BackendUnavailable, match="no feed-forward server answered in 3 attempts"):
                engine.decode_step(model, remote, run.tokens[1])
            assert (engine.memory(), engine.handle(), dict(engine.stage_summary())) == before
        host.start()
        for engine, run in zip(engines, undisturbed, strict=True):
            for i, token in enumerate(run.tokens[1:], start=2):
                np.testing.assert_array_equal(engine.decode_step(model, remote, token)[0], run.hidden[i])


class _KilledAt(RemoteFfn):
    """The server dies when this layer is asked for."""

    def __init__(self, host: FfnHost, model: Weights, layer: int) -> None:
        super().__init__(host.url, model, QUICK)
        self._server, self._at = host, layer

    def feed(self, layer: int, h: np.ndarray) -> np.ndarray:
        if layer == self._at:
            self._server.kill()
        return super().feed(layer, h)


def test_a_server_killed_between_two_layers_of_one_step() -> None:
    model, prompt = weights("llama"), text(20)
    undisturbed = play("tq4", model, prompt, 1)
    with serving(model_file(**SHAPES["llama"])) as host:
        engine = kv_engine("tq4")
        engine.prefill(model, RemoteFfn(host.url, model), prompt)
        with pytest.raises(BackendUnavailable):
            engine.decode_step(model, _KilledAt(host, model, 1), undisturbed.tokens[0])
        # Nobody is needed: the router is the caller's choice, call by call.
        step = engine.decode_step(model, LocalFfn(model), undisturbed.tokens[0])
        np.testing.assert_array_equal(step[0], undisturbed.hidden[1])


def test_waits_double_up_to_a_bound() -> None:
    model, waited = weights("llama"), []
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    remote = RemoteFfn(url, model, Retry(attempts=6, wait_s=0.1, longest_wait_s=0.5), sleep=waited.append)
    with pytest.raises(
        BackendUnavailable, match=r"in 6 attempts .connection refused.; start it with kvtape ffn-server"
    ):
        remote.feed(0, np.zeros((1, 64), np.float32))
    assert waited == [0.1, 0.2, 0.4, 0.5, 0.5]


def test_a_server_that_starts_late_is_found() -> None:
    """Between the second attempt and the third."""
    model = weights("llama")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    servers: list[FfnServer] = []

    def start(seconds: float) -> None:
        if not servers:
            servers.append(FfnServer(model, port=port))
            threading.Thread(target=servers[0].serve_forever, daemon=True).start()

    remote = RemoteFfn(f"http://127.0.0.1:{port}", model, QUICK, sleep=start)
    rows = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_array_equal(remote.feed(1, rows), LocalFfn(model).feed(1, rows))
    servers[0].shutdown()
    servers[0].server_close()


def test_a_server_that_says_nothing_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}"
        remote = RemoteFfn(url, weights("llama"), Retry(attempts=2, timeout_s=0.1), sleep=_silent)
        with pytest.raises(BackendUnavailable, match=r"2 attempts .timed out."):
            remote.feed(0, np.zeros((1, 64), np.float32))


def test_a_connection_is_kept_and_no_call_waits() -> None:
    """One connection for all calls, and no attempt beside the first."""
    model, waited, opened = weights("llama"), [], []
    with served(model) as server:
        answer = server.process_request
        server.process_request = lambda *place: (opened.append(place), answer(*place))[1]  # type: ignore[method-assign]
        remote = RemoteFfn(server.url, model, sleep=waited.append)
        for layer in (0, 1, 0, 1):
            remote.feed(layer, np.ones((3, 64), np.float32))
        remote.close()
    assert (len(opened), waited) == (1, [])


def test_many_rows_are_sent_in_frames() -> None:
    model = weights("llama")
    rows = np.random.default_rng(0).standard_normal((MAX_ROWS + 5, 64)).astype(np.float32)
    with served(model) as server:
        got = RemoteFfn(server.url, model).feed(0, rows)
    np.testing.assert_array_equal(got, LocalFfn(model).feed(0, rows))


def test_another_model_is_refused(host: FfnHost) -> None:
    """Of the same sizes, with other weights."""
    other = Weights(model_file(**SHAPES["llama"], seed=5))
    with pytest.raises(ExecutionRefused, match=r"binding_defect.*serves another model"):
        RemoteFfn(host.url, other).feed(0, np.zeros((1, 64), np.float32))
    frame = FfnFrame(0, model_key(other), np.zeros((1, 64), np.float32))
    assert _posted(host, frame.encode())[0] == 409


def test_rows_in_float64_do_not_travel() -> None:
    with pytest.raises(ExecutionRefused, match="open the model in float32"):
        RemoteFfn("http://127.0.0.1:1", weights("llama", "float64"))
    with pytest.raises(UsageError, match="open the model in float32"):
        FfnServer(weights("llama", "float64"))


@pytest.mark.parametrize("url", ["127.0.0.1:80", "https://h:1", "http://h", "http://h:1/path", "http://h:x", "http://"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(UsageError, match="write http://HOST:PORT"):
        RemoteFfn(url, weights("llama"))


def _answer(status: int, body: bytes, length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % (status, size) + body


def _info() -> bytes:
    return _answer(200, json.dumps({"model": model_key(weights("llama")).hex()}).encode())


def _frame(**other: object) -> bytes:
    fields = {"layer": 0, "model": model_key(weights("llama")), "rows": np.zeros((1, 64), np.float32), **other}
    return FfnFrame(**fields).encode()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([_answer(200, b"<html>")], "what answers there is not kvtape ffn-server"),
        ([_answer(404, b"{}")], "what answers there is not kvtape ffn-server"),
        (["info", _answer(500, b'{"error": "out of\\n memory"}')], r"out of memory .status 500"),
        (["info", _answer(200, b"short")], "5 bytes are no frame"),
        (["info", _answer(200, b"x" * 296)], "no frame of version 1"),
        (["info", _answer(200, b"", 10**9)], "an answer of 1000000000 bytes where 2000 at most were due"),
        (["info", _answer(200, _frame(layer=1))], "rows of layer 1 where layer 0 was asked"),
        (["info", _answer(200, _frame()[:-1] + b"\x01")], "damaged on their way"),
    ],
)
def test_an_answer_that_cannot_be_used_is_not_asked_for_again(answers: list[object], message: str) -> None:
    script = [_info() if a == "info" else a for a in answers]
    with scripted_answers(script) as url, pytest.raises(BackendFailure, match=message):  # type: ignore[arg-type]
        RemoteFfn(url, weights("llama"), QUICK, sleep=_silent).feed(0, np.zeros((1, 64), np.float32))


@pytest.mark.parametrize(
    "lost",
    [b"", b"HTTP/1.1 200 X\r\nContent-", _answer(200, _frame()[:90], 296), _answer(503, b""), b"rubbish\r\n\r\n"],
)
def test_an_answer_that_did_not_come_is_asked_for_again(lost: bytes) -> None:
    with scripted_answers([_info(), lost, _info(), _answer(200, _frame())]) as url:
        got = RemoteFfn(url, weights("llama"), QUICK, sleep=_silent).feed(0, np.zeros((1, 64), np.float32))
    np.testing.assert_array_equal(got, 0)


def _posted(host: FfnHost, body: bytes, **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", host.port, timeout=5)
    path = headers.pop("path", "/v1/ffn")
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    connection.request("POST", path, body, {"Content-Type": "application/vnd.kvtape.ffn", **named})
    response = connection.getresponse()
    told = response.read()
    connection.close()
    return response.status, "" if response.status == 200 else json.loads(told)["error"]


def test_the_server_takes_only_what_it_can_use(host: FfnHost) -> None:
    good = FfnFrame(0, model_key(weights("llama")), np.zeros((1, 64), np.float32))
    assert _posted(host, good.encode())[0] == 200
    assert _posted(host, good.encode(), path="/v2/ffn")[0] == 404
    assert _posted(host, good.encode(), Content_Type="text/plain")[0] == 415
    assert _posted(host, b"", Content_Length="many")[0] == 411
    assert _posted(host, good.encode(), Host="kvtape.example:8077")[0] == 403
    assert _posted(host, good.encode(), Host="[::1")[0] == 403
    assert (
        _posted(host, good.encode(), Host="[::1]:8077")[0] == _posted(host, good.encode(), Host="localhost")[0] == 200
    )
    assert _posted(host, b"", Content_Length=str(2**40)) == (413, "at most 524328 bytes a request")
    assert _posted(host, b"KTFF")[0] == 400
    assert _posted(host, good.encode()[:-4])[0] == 400
    assert _posted(host, FfnFrame(2, good.model, good.rows).encode()) == (400, "layers are 0..1, rows have 64")
    assert _posted(host, FfnFrame(0, good.model, np.zeros((1, 32), np.float32)).encode())[0] == 400
    assert _posted(host, good.encode())[0] == 200


def test_connections_are_bounded_and_silent_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtape.backends.reference.remote.server._MAX_CONNECTIONS", 1)
    model, rows = weights("llama"), np.ones((1, 64), np.float32)
    with served(model, silent_s=0.2) as server:
        with socket.create_connection(server.server_address[:2]) as silent:  # type: ignore[arg-type]
            with pytest.raises(BackendUnavailable, match=r"busy|reset"):
                RemoteFfn(server.url, model, Retry(attempts=2), sleep=_silent).feed(0, rows)
            assert silent.recv(1) == b""
        patient = RemoteFfn(server.url, model, Retry(attempts=9))
        np.testing.assert_array_equal(patient.feed(0, rows), LocalFfn(model).feed(0, rows))
        patient.close()


@pytest.mark.parametrize("host_name", ["0.0.0.0", "192.168.1.1", "example.org", "::", ""])
def test_the_server_stays_on_loopback(host_name: str) -> None:
    with pytest.raises(UsageError, match="is not loopback"):
        FfnServer(weights("llama"), host_name)


def test_the_other_loopback() -> None:
    model, rows = weights("llama"), np.ones((2, 64), np.float32)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    with served(model, host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        np.testing.assert_array_equal(RemoteFfn(server.url, model).feed(0, rows), LocalFfn(model).feed(0, rows))


def test_a_port_that_is_taken() -> None:
    with (
        FfnServer(weights("llama")) as server,
        pytest.raises(EnvironmentProblem, match="in use; choose another port"),
    ):
        FfnServer(weights("llama"), port=server.server_port)


@given(layer=st.integers(0, 99), n=st.integers(1, 5), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_a_frame_is_read_as_it_was_written(layer: int, n: int, width: int, seed: int) -> None:
    rows = np.random.default_rng(seed).standard_normal((n, width)).astype(np.float32)
    frame = FfnFrame.decode(FfnFrame(layer, bytes(range(16)), rows).encode())
    assert (frame.layer, frame.model) == (layer, bytes(range(16)))
    np.testing.assert_array_equal(frame.rows, rows)


@given(at=st.integers(0, HEADER_BYTES + 23), bit=st.integers(0, 7))
def test_no_flipped_bit_passes_as_other_rows(at: int, bit: int) -> None:
    rows = np.ones((2, 3), np.float32)
    data = bytearray(FfnFrame(1, bytes(16), rows).encode())
    data[at] ^= 1 << bit
    try:
        frame = FfnFrame.decode(bytes(data))
    except FrameError:
        return
    # Reserved bytes, the layer and the model are outside of the checksum: the client compares the last two.
    assert at in (6, 7) or frame.layer != 1 or frame.model != bytes(16)
    np.testing.assert_array_equal(frame.rows, rows)


def test_a_frame_of_too_many_rows_is_refused() -> None:
    n = MAX_ROWS + 1
    body = bytes(4 * n)
    data = struct.pack("<4sHHIIII16s", b"KTFF", 1, 0, 0, n, 1, zlib.crc32(body), bytes(16)) + body
    with pytest.raises(FrameError, match=f"frame of {n} rows"):
        FfnFrame.decode(data)


def test_the_command_says_where_it_listens_and_ends_on_an_interrupt() -> None:
    host = FfnHost(model_file(**SHAPES["llama"]))
    assert host.info["schema"] == "kvtape.ffn-server/1"
    assert (host.info["arch"], host.info["n_layer"], host.info["n_embd"]) == ("llama", 2, 64)
    assert host.interrupt() == 130


def test_the_command_refuses_other_interfaces() -> None:
    ran = kvtape_process(["ffn-server", "--model", model_file(**SHAPES["llama"]), "--host", "0.0.0.0"])
    assert ran.code == 2
    assert "not loopback" in ran.err
