"""The published document, and requests drawn from it: no 5xx, and no answer that is not in it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from kvtape.serve.local import Limits
from support.drawn_requests import CHECKS, make_right
from support.http_server import served
from support.served import tiny_service

CASES = 40
OPERATIONS = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/health"),
    ("GET", "/metrics"),
)


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
        if mode is GenerationMode.POSITIVE:
            make_right(case, count, 8, without=["tools"])
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
