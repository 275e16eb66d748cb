"""Sessions whose rows live at a server: the bits of the engine there, lost answers, lost rows, refusals."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.errors import InputRejected, UsageError
from kvtape.backends.reference.engines.engine import KvEngine, StateHandle
from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import parse_engine
from kvtape.backends.reference.errors import (
    BackendFailure,
    BackendUnavailable,
    EmptyPrompt,
    ExecutionRefused,
    StateInvalidated,
)
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.remote import session_host
from kvtape.backends.reference.remote.ffn_remote import RemoteFfn
from kvtape.backends.reference.remote.http_calls import Retry
from kvtape.backends.reference.remote.remote_engine import RemoteEngine
from kvtape.backends.reference.remote.server import SESSION_TYPE
from support.ffn_host import FfnHost, served, serving
from support.llama_tiny import model_file
from support.reference import SHAPES, kv_engine, play, text, weights

QUICK = Retry(attempts=2, timeout_s=20.0, wait_s=0.01)


@pytest.fixture(scope="module")
def host() -> Iterator[FfnHost]:
    with serving(model_file(**SHAPES["llama"])) as host:
        yield host


def _remote(url: str, spec: str = "standard") -> tuple[RemoteEngine, RemoteFfn]:
    model = weights("llama")
    return RemoteEngine(url, parse_engine(spec), model, QUICK), RemoteFfn(url, model, QUICK)


@pytest.mark.parametrize("spec", ["standard", "standard:window=16", "no-cache", "markov-rs:window=8", "tq3"])
def test_a_remote_session_is_the_local_engine_to_the_bit(spec: str, host: FfnHost) -> None:
    """Rows, memory and counters too; and the handle says where the rows live."""
    model, prompt = weights("llama"), text(30)
    local = play(spec, model, prompt, 4)
    engine, ffn = _remote(host.url, spec)
    assert isinstance(engine, KvEngine)
    hidden = [engine.prefill(model, ffn, prompt)]
    hidden += [engine.decode_step(model, ffn, token) for token in local.tokens]
    np.testing.assert_array_equal(np.concatenate(hidden), local.hidden)
    assert engine.memory() == local.engine.memory()
    assert engine.stage_summary() == local.engine.stage_summary()
    assert engine.window_tokens == local.engine.window_tokens
    assert engine.info == local.engine.info
    for layer, position in [(0, 0), (1, 20), (1, 33), (0, 99)]:
        want, got = local.engine.read_kv_row(layer, position), engine.read_kv_row(layer, position)
        assert (want is None) == (got is None)
        if want is not None and got is not None:
            np.testing.assert_array_equal(got[0], want[0])
            np.testing.assert_array_equal(got[1], want[1])
    assert local.engine.handle() == StateHandle(local.engine.info.spec, 34, "local", "")
    assert engine.handle() == StateHandle(local.engine.info.spec, 34, "remote", host.url)
    engine.close()


def test_the_harness_takes_a_remote_session(host: FfnHost) -> None:
    engine, ffn = _remote(host.url)
    assert (
        Harness(engine, weights("llama"), ffn).greedy(text(9), 5)
        == play("standard", weights("llama"), text(9), 5).tokens[:5]
    )
    engine.close()


@settings(max_examples=15, deadline=None)
@given(
    plan=st.lists(st.sampled_from(["step", "answer lost", "again"]), min_size=1, max_size=8), spec=st.just("standard")
)
def test_steps_whose_answer_was_lost_are_computed_once(plan: list[str], spec: str) -> None:
    """The answer goes missing after the server computed it; the identical token is tried again."""
    model, prompt = weights("llama"), text(10)
    with served(weights("llama")) as server:
        undisturbed = kv_engine(spec)
        undisturbed.prefill(model, LocalFfn(model), prompt)
        engine, ffn = _remote(server.url, spec)
        engine.prefill(model, ffn, prompt)
        for token, what in zip(text(len(plan), seed=3), plan, strict=True):
            want = undisturbed.decode_step(model, LocalFfn(model), token)
            if what != "step":
                engine._asked("POST", f"{engine._path}/step", {"tokens": [token], "n_tokens": engine.handle().n_tokens})
            if what == "again":
                engine._caller.close()
            np.testing.assert_array_equal(engine.decode_step(model, ffn, token), want)
        assert engine.stage_summary() == undisturbed.stage_summary()
        assert engine.memory() == undisturbed.memory()
        engine.close()
        ffn.close()


def test_a_prompt_whose_answer_was_lost_leaves_the_session_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where both prompts are of one length, and the server would not see the difference. One session stays."""
    model, prompt = weights("llama"), text(10)
    want = play("standard", model, prompt, 1)
    with served(weights("llama")) as server:
        engine, ffn = _remote(server.url)
        engine.prefill(model, ffn, prompt)
        real = engine._asked

        def lost(*args: object) -> None:
            real(*args)  # type: ignore[arg-type]
            raise BackendUnavailable("the answer was lost")

        with monkeypatch.context() as patch:
            patch.setattr(engine, "_asked", lost)
            with pytest.raises(BackendUnavailable):
                engine.prefill(model, ffn, text(10, seed=9))
        np.testing.assert_array_equal(engine.decode_step(model, ffn, want.tokens[0])[0], want.hidden[1])
        held = len(server._sessions._held)
        engine.prefill(model, ffn, prompt)
        assert len(server._sessions._held) == held
        engine.close()
        ffn.close()


def test_a_server_that_was_killed_took_the_rows_with_it() -> None:
    """While it is away the step can be tried again; once it is back it has lost the rows, and that is said."""
    model, prompt = weights("llama"), text(20)
    want = play("standard", model, prompt, 1)
    with serving(model_file(**SHAPES["llama"])) as host:
        engine, ffn = _remote(host.url)
        engine.prefill(model, ffn, prompt)
        host.kill()
        with pytest.raises(BackendUnavailable, match="in 2 attempts"):
            engine.decode_step(model, ffn, want.tokens[0])
        assert engine.handle().n_tokens == 20
        host.start()
        for _ in range(2):
            with pytest.raises(StateInvalidated, match=r"does not hold the session .*prefill the session again"):
                engine.decode_step(model, ffn, want.tokens[0])
        engine.prefill(model, ffn, prompt)
        np.testing.assert_array_equal(engine.decode_step(model, ffn, want.tokens[0])[0], want.hidden[1])


def test_the_session_that_was_silent_longest_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_host, "MAX_SESSIONS", 2)
    model = weights("llama")
    with served(weights("llama")) as server:
        (first, ffn), (second, _), (third, _) = (_remote(server.url) for _ in range(3))
        first.prefill(model, ffn, text(5))
        second.prefill(model, ffn, text(5))
        first.decode_step(model, ffn, 9)
        third.prefill(model, ffn, text(5))
        first.decode_step(model, ffn, 9)
        with pytest.raises(StateInvalidated):
            second.decode_step(model, ffn, 9)
        for engine in (first, second, third):
            engine.close()
        ffn.close()


def test_feed_forward_layers_are_where_the_rows_are(host: FfnHost) -> None:
    model = weights("llama")
    engine, ffn = _remote(host.url)
    with pytest.raises(ExecutionRefused, match=r"residency.*feed-forward layers are computed there; not local"):
        engine.prefill(model, LocalFfn(model), text(5))
    with pytest.raises(ExecutionRefused, match=r"residency.*not remote http://127.0.0.1:1"):
        engine.prefill(model, RemoteFfn("http://127.0.0.1:1", model), text(5))
    with pytest.raises(ExecutionRefused, match=r"binding_defect.*other weights"):
        engine.prefill(weights("qwen3"), ffn, text(5))
    assert engine.handle() == StateHandle("standard", 0, "remote", host.url)


def test_what_a_remote_session_must_not_be_given(host: FfnHost) -> None:
    model = weights("llama")
    engine, ffn = _remote(host.url)
    for call in (lambda: engine.decode_step(model, ffn, 5), lambda: engine.read_kv_row(0, 0)):
        with pytest.raises(EmptyPrompt, match="nothing was prefilled"):
            call()
    with pytest.raises(EmptyPrompt):
        engine.prefill(model, ffn, [])
    with pytest.raises(InputRejected):
        engine.prefill(model, ffn, [model.n_vocab])
    with pytest.raises(BackendFailure, match="5000 tokens for a model trained for 4096"):
        engine.prefill(model, ffn, text(5000))
    assert (engine.memory().rows, engine.stage_summary()) == (0, {})
    engine.prefill(model, ffn, text(5))
    with pytest.raises(IndexError, match="layer 2"):
        engine.read_kv_row(2, 0)
    assert engine.read_kv_row(0, -1) is None
    engine.close()
    with pytest.raises(ExecutionRefused, match="no KV engine"):
        _remote(host.url, "apollo")
    with pytest.raises(ExecutionRefused, match="open the model in float32"):
        RemoteEngine(host.url, parse_engine("standard"), weights("llama", "float64"))


def test_a_refusal_of_the_engine_there_is_the_same_refusal_here() -> None:
    shape = {"arch": "llama", "n_head": 3, "n_head_kv": 3, "head_dim": 16}
    model = Weights(model_file(**shape))
    with served(model) as server:
        engine = RemoteEngine(server.url, parse_engine("tq4"), model)
        with pytest.raises(ExecutionRefused, match=r"^refused .unsupported.: turbo-quant: a key row has 48 components"):
            engine.prefill(model, RemoteFfn(server.url, model), text(3))
        engine._caller.close()


EXCHANGES: list[tuple[str, str, bytes, int]] = [
    ("PUT", "", b"{", 400),
    ("PUT", "", b"[" * 100_000, 400),
    ("PUT", "", b'{"spec": "standard", "tokens": []}', 422),
    ("PUT", "", b'{"spec": "standard", "tokens": [1.5]}', 422),
    ("PUT", "", b'{"spec": "standard", "tokens": [true]}', 422),
    ("PUT", "", b'{"spec": "standrad", "tokens": [5]}', 422),
    ("PUT", "", b'{"spec": "apollo", "tokens": [5]}', 422),
    ("PUT", "", b'{"spec": "boundary-kv", "tokens": [5]}', 422),
    ("PUT", "", b'{"spec": "standard", "tokens": [999999]}', 422),
    ("PUT", "", b'{"spec": "standard", "tokens": [5]}', 200),
    ("POST", "/step", b'{"tokens": [5], "n_tokens": 7}', 422),
    ("POST", "/step", b'{"tokens": [5, 6], "n_tokens": 1}', 422),
    ("POST", "/step", b'{"tokens": [6], "n_tokens": 1}', 200),
    ("POST", "/stop", b"{}", 404),
    ("POST", "", b"{}", 405),
    ("GET", "/rows/9/0", b"", 400),
    ("GET", "/rows/0/0", b"", 200),
    ("GET", "", b"", 200),
    ("DELETE", "", b"", 200),
    ("GET", "", b"", 422),
]
"""In this order: there is a session between the PUT that is good and the DELETE."""


def test_the_server_takes_only_what_it_can_use(host: FfnHost) -> None:
    for method, path, body, status in EXCHANGES:
        connection = http.client.HTTPConnection("127.0.0.1", host.port, timeout=10)
        connection.request(method, f"/v1/sessions/{'0' * 32}{path}", body, {"Content-Type": SESSION_TYPE})
        response = connection.getresponse()
        told = response.read()
        connection.close()
        assert response.status == status, (method, path, body, told)
        if status >= 400:
            assert json.loads(told)["error"]


def test_a_session_is_no_longer_than_the_model_was_trained_for() -> None:
    model = Weights(model_file("llama", n_ctx=8))
    host = session_host.SessionHost(model)
    host.begin("name", {"spec": "standard", "tokens": text(7)})
    host.step("name", {"tokens": [5], "n_tokens": 7})
    with pytest.raises(UsageError, match="9 tokens for a model trained for 8"):
        host.step("name", {"tokens": [6], "n_tokens": 8})
    with pytest.raises(UsageError, match="9 tokens for a model trained for 8"):
        host.begin("other", {"spec": "standard", "tokens": text(9)})
