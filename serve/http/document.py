"""The OpenAPI document of a server, made from the shapes and the failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvtape.serve.http.asking import SESSION_HEADER, SESSION_NAME
from kvtape.serve.http.failures import FAILURES
from kvtape.serve.http.shapes import (
    Chat,
    ChatChunk,
    ChatCompletion,
    Completion,
    CompletionText,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
)

__all__ = ["openapi"]

_BODIES = (Chat, Completion)
_ANSWERS = (ChatCompletion, ChatChunk, CompletionText, ErrorBody, Health, ModelCard, ModelList)
_ALWAYS = (401, 403, 405, 408, 413, 500)


def openapi(model_name: str, version: str, *, keys: bool) -> dict[str, Any]:
    """OpenAPI 3.1. `keys`: whether a request needs one."""
    _, inputs = models_json_schema([(m, "validation") for m in _BODIES], ref_template="#/components/schemas/{model}")
    _, outputs = models_json_schema(
        [(m, "serialization") for m in _ANSWERS], ref_template="#/components/schemas/{model}"
    )
    schemas = {**outputs["$defs"], **inputs["$defs"]}
    for body in _BODIES:
        schemas[body.__name__]["properties"]["model"] = {"type": "string", "enum": [model_name]}
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "kvtape serve",
            "version": version,
            "summary": "OpenAI-compatible, every cache operation on tape",
        },
        "paths": {
            "/v1/chat/completions": {"post": _generation("createChatCompletion", Chat, ChatCompletion, ChatChunk)},
            "/v1/completions": {"post": _generation("createCompletion", Completion, CompletionText, CompletionText)},
            "/v1/models": {"get": _reading("listModels", ModelList)},
            "/v1/models/{model}": {"get": _reading("retrieveModel", ModelCard, path="model")},
            "/health": {"get": _reading("health", Health, not_now=Health)},
            "/metrics": {"get": _reading("metrics", None, media="text/plain")},
            "/openapi.json": {"get": _reading("document", None)},
        },
        "components": {"schemas": schemas},
    }
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        document["paths"]["/health"]["get"]["security"] = []
    return document


def _generation(name: str, body: type[BaseModel], answer: type[BaseModel], event: type[BaseModel]) -> dict[str, Any]:
    content = {
        "application/json": {"schema": _ref(answer)},
        # Of one event, as OpenAPI has it since 3.2 (`data` is the text behind `data: `).
        "text/event-stream": {
            "schema": {
                "type": "object",
                "properties": {
                    "data": {
                        "type": "string",
                        "description": f"a {event.__name__} as JSON, at the end `[DONE]`; an ErrorBody when it failed",
                    }
                },
                "required": ["data"],
            }
        },
    }
    return {
        "operationId": name,
        "parameters": [
            {
                "name": SESSION_HEADER,
                "in": "header",
                "required": False,
                "schema": {"type": "string", "pattern": f"^{SESSION_NAME.pattern}$"},
            }
        ],
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(body)}}},
        "responses": {
            "200": {"description": "the answer; events with `stream`", "content": content},
            **_failures((400, 404, 415, 429, 503)),
        },
    }


def _reading(
    name: str,
    answer: type[BaseModel] | None,
    *,
    path: str | None = None,
    not_now: type[BaseModel] | None = None,
    media: str = "application/json",
) -> dict[str, Any]:
    """`answer` None: a text or an object that no shape describes. `not_now`: the answer of a 503."""
    schema = _ref(answer) if answer is not None else {"type": ["string", "object"]}
    operation: dict[str, Any] = {
        "operationId": name,
        "responses": {
            "200": {"description": "what was asked for", "content": {media: {"schema": schema}}},
            **_failures(()),
        },
    }
    if not_now is not None:
        content = {"application/json": {"schema": _ref(not_now)}}
        operation["responses"]["503"] = {"description": "not now", "content": content}
    if path is not None:
        operation["parameters"] = [{"name": path, "in": "path", "required": True, "schema": {"type": "string"}}]
        operation["responses"] |= _failures((404,))
    return operation


def _failures(statuses: Sequence[int]) -> dict[str, Any]:
    told = {}
    for status in sorted({*statuses, *_ALWAYS}):
        codes = {code: why for code, (of, why) in FAILURES.items() if of == status}
        told[str(status)] = {
            "description": "; ".join(f"`{code}`: {why}" for code, why in codes.items()),
            "content": {"application/json": {"schema": _ref(ErrorBody)}},
        }
    return told


def _ref(model: type[BaseModel]) -> Mapping[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
