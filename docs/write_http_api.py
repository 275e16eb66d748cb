"""Write the generated parts of docs/http-api.md: endpoints, fields, limits, failures, metrics (`make docs`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

import page_parts
from kvtape.serve.http.connection import Patience
from kvtape.serve.http.document import openapi
from kvtape.serve.http.failures import FAILURES
from kvtape.serve.http.gate import BodyLimits
from kvtape.serve.http.metrics import Metrics
from kvtape.serve.http.neutral import WORDS
from kvtape.serve.http.shapes import Chat, Completion
from kvtape.serve.local import Limits
from kvtape.serve.requests import ServiceStatus

PAGE = Path(__file__).parent / "http-api.md"


class _Idle:
    """As much of a service as its metrics need."""

    model_name = "model"

    def status(self) -> ServiceStatus:
        return ServiceStatus(True, 0, 0, 1, 0, 1)


def endpoints() -> str:
    paths = openapi("model", "0", keys=False)["paths"]
    rows = [
        (f"`{method.upper()} {path}`", ", ".join(sorted(operation["responses"])))
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]
    return page_parts.table(("endpoint", "statuses"), rows)


def fields() -> str:
    """Fields that are not acted on, those of one reason together."""
    chat = Chat.model_json_schema()
    known = {**chat["properties"], **Completion.model_json_schema()["properties"]}
    together: dict[str, list[str]] = {}
    for field, why in WORDS.items():
        together.setdefault(why, []).extend(f"`{field}: {value}`" for value in neutral(known[field], chat["$defs"]))
    return page_parts.table(
        ("taken, as it asks for nothing", "why any other is refused"), [(", ".join(v), w) for w, v in together.items()]
    )


def neutral(schema: Mapping[str, Any], defined: Mapping[str, Any]) -> list[str]:
    """As JSON, the values that a field's schema takes; null alone where there is no other."""
    of = schema.get("anyOf", [schema])[0]
    if "$ref" in of:
        of = defined[of["$ref"].rpartition("/")[2]]
    if "const" in of or "enum" in of:
        values = of.get("enum", [of.get("const")])
    elif of["type"] == "number":
        values = [of["minimum"]]
    elif of["type"] == "array":
        values = [[of["items"]["const"]] * of["maxItems"] if of["maxItems"] else []]
    else:
        values = [None if of["type"] == "null" else {k: v["const"] for k, v in of.get("properties", {}).items()}]
    return [json.dumps(value) for value in values]


def limits() -> str:
    body, patience, turn = BodyLimits(), Patience(), Limits()
    messages = Chat.model_json_schema()["properties"]["messages"]["maxItems"]
    rows = [
        ("a body", f"{body.body_bytes} bytes", "413"),
        ("a body's arrival", f"{body.body_s:g} s", "408"),
        ("headers of a request", f"{body.headers}, and 64 KiB together", "400"),
        ("the headers' arrival", f"{patience.headers_s:g} s", "the connection is closed"),
        ("connections", patience.connections, "429"),
        ("a client that does not read", f"{patience.stall_s:g} s with full buffers", "the connection is broken"),
        ("messages of a chat", messages, "400"),
        ("requests that wait (`--queue`)", turn.queue, "429"),
        ("a request, waiting included (`--timeout`)", f"{turn.turn_s:g} s", "408"),
        ("what runs at the end (`--grace`)", f"{turn.grace_s:g} s", "503"),
    ]
    return page_parts.table(("what", "how much", "beyond it"), rows)


def failures() -> str:
    return page_parts.table(
        ("status", "`code`", "when"), [(status, f"`{code}`", why) for code, (status, why) in FAILURES.items()]
    )


def metrics() -> str:
    families = text_string_to_metric_families(Metrics(_Idle()).text().decode())  # type: ignore[arg-type]
    rows = [
        (f"`{f.name}{'_total' if f.type == 'counter' else ''}`", f.type, f.documentation)
        for f in families
        if not f.name.endswith("_created")
    ]
    return page_parts.table(("metric", "type", "what"), rows)


PARTS = {"endpoints": endpoints, "fields": fields, "limits": limits, "failures": failures, "metrics": metrics}
"""By the marker around each in the page."""


def filled(text: str) -> str:
    """The page with its generated parts as they would be now."""
    return page_parts.filled(text, PARTS)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
