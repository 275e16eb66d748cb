"""The front over a real service on a tiny model, talked to by the real client."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.planner.events import Op
from kvtape.serve.http.access import Access
from kvtape.serve.http.connection import Patience
from kvtape.serve.http.failures import FAILURES
from kvtape.serve.http.gate import BodyLimits
from kvtape.serve.http.neutral import WORDS, NeutralChat, NeutralCompletion, NeutralGeneration
from kvtape.serve.http.shapes import Chat, Completion
from kvtape.serve.local import Limits
from kvtape.testing.sink import ListSink
from support.http_server import served
from support.served import tiny_service

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "the cache"}], "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with tiny_service(slots=2) as service, served(service) as address:
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def post(url: str, body: object, path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
    return httpx.post(url + path, content=json.dumps(body), headers={"Content-Type": "application/json", **headers})


def assert_failed(response: httpx.Response, code: str, param: str | None = None) -> None:
    assert response.status_code == FAILURES[code][0], response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["code"], error["param"]) == (code, param)
    assert "\n" not in error["message"]


def test_a_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CHAT)  # type: ignore[call-overload]
    chunks = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    said = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert said == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 6
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == whole.usage.prompt_tokens - 1


def test_a_completion_of_a_text_and_of_ids(client: openai.OpenAI) -> None:
    one = client.completions.create(model="tiny", prompt="the cache", max_tokens=5, temperature=0, logprobs=2)
    logprobs = one.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert len(logprobs.tokens) == 5
    assert logprobs.top_logprobs is not None
    assert max(logprobs.top_logprobs[0].values()) == (logprobs.token_logprobs or [])[0]
    streamed = client.completions.create(model="tiny", prompt="the cache", max_tokens=5, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in streamed if c.choices) == one.choices[0].text
    ids = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=2)
    assert ids.usage is not None
    assert ids.usage.prompt_tokens == 3


def test_chat_log_probabilities(client: openai.OpenAI) -> None:
    told = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=2)  # type: ignore[call-overload]
    content = told.choices[0].logprobs.content
    assert len(content) == 6
    assert all(c.logprob == c.top_logprobs[0].logprob for c in content)


def test_models_health_and_metrics(client: openai.OpenAI, url: str) -> None:
    assert [m.id for m in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert httpx.get(f"{url}/health").json()["status"] == "ok"
    text = httpx.get(f"{url}/metrics").text
    assert 'vllm:num_requests_running{model_name="tiny"} 0.0' in text
    assert 'vllm:request_success_total{finished_reason="length",model_name="tiny"}' in text
    assert 'kvtape:evicted_tokens_total{model_name="tiny"} 0.0' in text


@pytest.mark.parametrize(
    ("change", "code", "param"),
    [
        ({"n": 2}, "unsupported", "n"),
        ({"response_format": {"type": "json_object"}}, "unsupported", "response_format.type"),
        ({"what": 1}, "unsupported", "what"),
        ({"temperature": 9}, "invalid_request", "temperature"),
        ({"top_p": 0}, "invalid_request", "top_p"),
        ({"max_tokens": 0}, "invalid_request", "max_tokens"),
        ({"stop": [""]}, "invalid_request", "stop.0"),
        ({"messages": []}, "invalid_request", "messages"),
        ({"messages": "hi"}, "invalid_request", "messages"),
        ({"messages": [{"role": "user"}]}, "invalid_prompt", None),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "invalid_request",
            "messages.0.content.0.type",
        ),
        ({"messages": [{"role": "king", "content": "x"}]}, "invalid_request", "messages.0.role"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ({"messages": [{"role": "user", "content": "long " * 2000}]}, "context_length_exceeded", None),
    ],
)
def test_a_bad_field_is_named(url: str, change: dict[str, object], code: str, param: str | None) -> None:
    assert_failed(post(url, {**CHAT, **change}), code, param)


REFUSED = {
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1},
    "top_k": 40,
    "min_p": 0.05,
    "mirostat": 2,
    "stop_token_ids": [1],
    "reasoning_effort": "high",
    "verbosity": "low",
    "modalities": ["audio"],
    "audio": {"voice": "x"},
    "prediction": {"type": "content", "content": "x"},
    "tool_choice": "required",
    "function_call": {"name": "x"},
    "chat_template_kwargs": {"enable_thinking": False},
}
PASSES = {
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "repeat_penalty": 1.0,
    "logit_bias": {},
    "top_k": -1,
    "min_p": 0.0,
    "stop_token_ids": [],
    "reasoning_effort": "none",
    "verbosity": "medium",
    "modalities": ["text"],
    "skip_special_tokens": True,
    "prompt_cache_retention": "24h",
}


@pytest.mark.parametrize("field", REFUSED)
def test_a_field_that_is_not_acted_on_is_refused_in_words(url: str, field: str) -> None:
    response = post(url, {**CHAT, field: REFUSED[field]})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"].split(".")[0]) == (400, "unsupported", field)
    assert error["message"].endswith(f": {WORDS[field]}")


def test_what_asks_for_nothing_passes(url: str) -> None:
    plain = post(url, CHAT).json()["choices"]
    assert post(url, CHAT | PASSES).json()["choices"] == plain
    assert post(url, CHAT | {"top_k": 0}).json()["choices"] == plain


@pytest.mark.parametrize("shape", [Chat, Completion])
def test_null_passes_in_every_field_that_is_not_required(url: str, shape: type[Chat | Completion]) -> None:
    nulls = {name: None for name, field in shape.model_fields.items() if not field.is_required()}
    if shape is Chat:
        response = post(url, {**nulls, **CHAT})
    else:
        response = post(url, {**nulls, "model": "tiny", "prompt": "the cache"}, "/v1/completions")
    assert response.status_code == 200, response.text


def test_every_field_that_is_not_acted_on_has_words() -> None:
    neutral = {name for shape in (NeutralChat, NeutralCompletion, NeutralGeneration) for name in shape.model_fields}
    assert neutral | {"response_format"} == set(WORDS)


@pytest.mark.parametrize(
    ("prompt", "code", "words"),
    [
        (["a", "b"], "unsupported", "one prompt a request"),
        (["12"], "unsupported", "one prompt a request"),
        ([[1, 2], [3]], "unsupported", "one prompt a request"),
        ([], "invalid_request", "a text or a list of token ids"),
        (5, "invalid_request", "a text or a list of token ids"),
    ],
)
def test_a_prompt_is_one(url: str, prompt: object, code: str, words: str) -> None:
    response = post(url, {"model": "tiny", "prompt": prompt}, "/v1/completions")
    assert_failed(response, code, "prompt")
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "tiny", "temperature": NaN, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "tiny", "seed": 1e400, "messages": [{"role": "user", "content": "x"}]}',
        b'{"model": "tiny", "tools": [' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b'], "messages": []}',
    ],
)
def test_a_body_that_is_none_is_refused(url: str, raw: bytes) -> None:
    kind = {"Content-Type": "application/json"}
    response = httpx.post(f"{url}/v1/chat/completions", content=raw, headers=kind)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_request"


def test_other_paths_methods_and_types(url: str) -> None:
    assert_failed(httpx.get(f"{url}/nowhere"), "not_found")
    assert_failed(httpx.get(f"{url}/v1/chat/completions"), "method_not_allowed")
    assert_failed(httpx.post(f"{url}/v1/chat/completions", content=b"x"), "unsupported_media_type")
    assert_failed(httpx.get(f"{url}/v1/models/other"), "model_not_found", "model")
    bad = {"X-Kvtape-Session": "no spaces"}
    assert_failed(post(url, CHAT, **bad), "invalid_request", "X-Kvtape-Session")
    assert_failed(httpx.get(f"{url}/health", headers={"Host": "evil.example"}), "wrong_host")


def test_a_named_conversation_keeps_its_session(url: str) -> None:
    usage = [post(url, CHAT, **{"X-Kvtape-Session": "mine"}).json()["usage"] for _ in range(2)]
    assert usage[1]["prompt_tokens_details"]["cached_tokens"] == usage[1]["prompt_tokens"] - 1


def test_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("first-key-of-two\nsecond-key-of-two\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="others can read"):
        Access.read("127.0.0.1", 0, file)
    file.chmod(0o600)
    with tiny_service() as service, served(service, access=Access.read("127.0.0.1", 0, file)) as url:
        assert httpx.get(f"{url}/health").status_code == 200
        assert_failed(httpx.get(f"{url}/v1/models"), "invalid_api_key")
        for wrong in ("Bearer nonsense", "first-key-of-two", "Basic first-key-of-two"):
            assert_failed(httpx.get(f"{url}/metrics", headers={"Authorization": wrong}), "invalid_api_key")
        good = {"Authorization": "Bearer second-key-of-two", "Host": "any.example"}
        assert httpx.get(f"{url}/v1/models", headers=good).status_code == 200
    monkeypatch.setenv("KVTAPE_API_KEY", "short")
    with pytest.raises(UsageError, match="shorter"):
        Access.read("127.0.0.1", 0, None)
    monkeypatch.delenv("KVTAPE_API_KEY")
    with pytest.raises(UsageError, match="--api-key-file"):
        Access.read("0.0.0.0", 0, None)
    with pytest.raises(UsageError, match="cannot be read"):
        Access.read("127.0.0.1", 0, tmp_path / "none")


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EnvironmentProblem, match="choose another --port"):
            Access("127.0.0.1", taken.getsockname()[1]).listen()


def test_bodies_are_bounded_in_bytes_and_time() -> None:
    with tiny_service() as service, served(service, limits=BodyLimits(body_bytes=1000, body_s=0.3)) as url:
        assert_failed(post(url, {**CHAT, "user": "x" * 1000}), "body_too_large")
        chunks = iter([b'{"a":', b"1" * 2000])
        assert_failed(httpx.post(f"{url}/v1/completions", content=chunks), "body_too_large")
        with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=5) as slow:
            slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
            assert b"408" in slow.recv(100)


def test_a_connection_that_says_nothing_is_closed() -> None:
    with (
        tiny_service() as service,
        served(service, patience=Patience(headers_s=0.2)) as url,
        socket.create_connection((urlsplit(url).hostname, urlsplit(url).port), timeout=5) as silent,
    ):
        silent.sendall(b"GET /health HT")
        assert silent.recv(100) == b""


LONG = {**CHAT, "messages": [{"role": "user", "content": "x"}], "max_tokens": 4000}
"""Two seconds of an answer that does not end by itself."""


def test_a_full_line_says_when_to_come_back() -> None:
    with tiny_service(limits=Limits(queue=1), n_ctx=4096) as service, served(service) as url:

        def ask() -> httpx.Response:
            return post(url, {**LONG, "max_tokens": 800})

        with ThreadPoolExecutor(4) as clients:
            told = [f.result() for f in [clients.submit(ask) for _ in range(4)]]
    assert sorted({r.status_code for r in told}) == [200, 429]
    full = next(r for r in told if r.status_code == 429)
    assert_failed(full, "too_many_requests")
    assert int(full.headers["Retry-After"]) >= 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_who_leaves_ends_its_turn(stream: bool) -> None:
    sink = ListSink()
    with tiny_service(sink=sink, n_ctx=4096) as service, served(service) as url:
        if stream:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json={**LONG, "stream": True}) as leaving:
                next(leaving.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(f"{url}/v1/chat/completions", json=LONG, timeout=0.2)
        until = time.monotonic() + 10
        while service.status().running and time.monotonic() < until:
            time.sleep(0.01)
        assert service.status().running == 0
    assert sum(e.completion_tokens or 0 for e in sink.events) < 4000
    assert sink.events[-1].op is Op.CLOSE


class _Broken:
    """A service with a defect in it."""

    model_name = "tiny"
    n_ctx = 64

    async def chat_prompt(self, *_: object) -> None:
        raise ValueError(f"secret prompt at {os.getcwd()}")  # noqa: PTH109

    def status(self) -> object:
        from kvtape.serve.requests import ServiceStatus

        return ServiceStatus(True, 0, 0, 1, 0, 64)

    async def close(self) -> None:
        pass


def test_a_defect_says_nothing_of_the_host(caplog: pytest.LogCaptureFixture) -> None:
    with served(_Broken()) as url:  # type: ignore[arg-type]
        response = post(url, CHAT)
    assert_failed(response, "internal_error")
    assert "secret" not in response.text
    assert "/" not in response.json()["error"]["message"]
    assert "secret" not in caplog.text
    assert "ValueError at _Broken.chat_prompt" in caplog.text


@pytest.mark.parametrize("policy", ["none", "stream:sink=4,recent=40"])
def test_a_chat_without_a_limit_ends_with_the_context_or_by_its_size(policy: str) -> None:
    """The tiny model does not end by itself."""
    body = {k: v for k, v in CHAT.items() if k != "max_tokens"}
    with tiny_service(policy=policy, n_ctx=256) as service, served(service) as url:
        told = post(url, body).json()
    assert told["choices"][0]["finish_reason"] == "length"
    usage = told["usage"]
    assert usage["completion_tokens"] == (256 if "stream" in policy else 256 - usage["prompt_tokens"])
