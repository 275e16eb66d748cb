"""The OpenAPI document of a server, made from the shapes and the failures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvtape.serve.http.asking import SESSION_HEADER
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
            "/health": {"get": _reading("health", Health, failures=(503,), failure=Health)},
            "/metrics": {"get": _reading("metrics", None)},
            "/openapi.json": {"get": _reading("document", None, media="application/json")},
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
                "schema": {"type": "string", "pattern": r"^[A-Za-z0-9._:-]{1,128}$"},
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
    failures: Sequence[int] = (),
    failure: type[BaseModel] | None = None,
    media: str = "text/plain",
) -> dict[str, Any]:
    schema = {"schema": _ref(answer)} if answer is not None else {"schema": {"type": ["string", "object"]}}
    content = {"application/json" if answer is not None else media: schema}
    operation: dict[str, Any] = {
        "operationId": name,
        "responses": {
            "200": {"description": "what was asked for", "content": content},
            **_failures(() if failure is not None else failures),
        },
    }
    for status in failures if failure is not None else ():
        operation["responses"][str(status)] = {
            "description": "not now",
            "content": {"application/json": {"schema": _ref(failure)}},
        }
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


def _ref(model: type[BaseModel] | None) -> Mapping[str, str]:
    assert model is not None
    return {"$ref": f"#/components/schemas/{model.__name__}"}
