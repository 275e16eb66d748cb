"""Requests drawn from the document that a server publishes: making them right, and holding answers against it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

__all__ = ["CHECKS", "make_right"]

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]


def make_right(case: Any, count: Iterator[int], max_tokens: int, *, without: Sequence[str] = ()) -> None:
    """Limit the answer that is asked for, and mend three bodies of four; `without`: fields that those do not have.

    An answer without a limit goes on until the context is full. What the document allows and a rule between two fields
    does not is mended: most draws would end there.
    """
    if not isinstance(case.body, dict):
        return
    case.body["max_tokens"] = max_tokens
    case.body.pop("max_completion_tokens", None)
    if next(count) % 4:
        case.body = {name: value for name, value in _mended(case.body).items() if name not in without}


def _mended(body: dict[str, Any]) -> dict[str, Any]:
    messages = [m | {"content": "x" if m.get("content") is None else m["content"]} for m in body.get("messages", [])]
    out = body | ({"messages": messages} if messages else {})
    if not out.get("logprobs"):
        out.pop("top_logprobs", None)
    return out
