"""The published document, and requests drawn from it: no 5xx, and no answer that is not in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from kvtape.serve.local import Limits
from support.http_server import served
from support.served import tiny_service

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
CASES = 40
OPERATIONS = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
)


def mended(body: dict[str, Any]) -> dict[str, Any]:
    """The body without what the document allows and a rule between two fields does not: most draws would end there."""
    messages = [m | {"content": "x" if m.get("content") is None else m["content"]} for m in body.get("messages", [])]
    out = body | ({"messages": messages} if messages else {})
    out.pop("tools", None)
    if not out.get("logprobs") and "top_logprobs" in out:
        del out["top_logprobs"]
    if not out.get("max_tokens") and not out.get("max_completion_tokens"):
        out["max_tokens"] = 2
    if out.get("max_completion_tokens"):
        out["max_completion_tokens"] = 2
    return out


@pytest.fixture(scope="module")
def document() -> Iterator[Any]:
    with tiny_service(slots=2, limits=Limits(queue=8, turn_s=20)) as service, served(service) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [(method, path, GenerationMode.POSITIVE) for method, path in OPERATIONS]
    # Nothing of the others can be wrong: they take no body.
    + [(method, path, GenerationMode.NEGATIVE) for method, path in OPERATIONS if method == "POST"],
)
def test_no_answer_is_outside_the_document(document: Any, method: str, path: str, mode: Any) -> None:
    operation = document[path][method]
    seen: set[int] = set()
    count = itertools.count()

    @settings(
        max_examples=CASES if method == "POST" else 5,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(generation_mode=mode))
    def fuzz(case: Any) -> None:
        # An answer without a limit goes on until the context is full.
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body["max_tokens"] = 8
            case.body.pop("max_completion_tokens", None)
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict) and next(count) % 4:
            case.body = mended(case.body)
        response = case.call()
        seen.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    fuzz()
    assert seen
    if method == "POST":
        assert 200 in seen if mode is GenerationMode.POSITIVE else 400 in seen


def test_the_operations_are_those_of_the_document(document: Any) -> None:
    there = {(r.ok().method.upper(), r.ok().path) for r in document.get_all_operations()}
    assert there == set(OPERATIONS)
