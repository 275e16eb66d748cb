"""Write the generated parts of docs/http-api.md: endpoints, limits, failures, metrics (`make docs`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from kvtape.serve.http.connection import Patience
from kvtape.serve.http.document import openapi
from kvtape.serve.http.failures import FAILURES
from kvtape.serve.http.gate import BodyLimits
from kvtape.serve.http.metrics import Metrics
from kvtape.serve.http.shapes import Chat
from kvtape.serve.local import Limits
from kvtape.serve.requests import ServiceStatus

PAGE = Path(__file__).parent / "http-api.md"


class _Idle:
    """As much of a service as its metrics need."""

    model_name = "model"

    def status(self) -> ServiceStatus:
        return ServiceStatus(True, 0, 0, 1, 0, 1)


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def endpoints() -> str:
    paths = openapi("model", "0", keys=False)["paths"]
    rows = [
        (f"`{method.upper()} {path}`", ", ".join(sorted(operation["responses"])))
        for path, methods in paths.items()
        for method, operation in methods.items()
    ]
    return table(("endpoint", "statuses"), rows)


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
    return table(("what", "how much", "beyond it"), rows)


def failures() -> str:
    return table(("status", "`code`", "when"), [(status, f"`{code}`", why) for code, (status, why) in FAILURES.items()])


def metrics() -> str:
    families = text_string_to_metric_families(Metrics(_Idle()).text().decode())  # type: ignore[arg-type]
    rows = [
        (f"`{f.name}{'_total' if f.type == 'counter' else ''}`", f.type, f.documentation)
        for f in families
        if not f.name.endswith("_created")
    ]
    return table(("metric", "type", "what"), rows)


PARTS = {"endpoints": endpoints, "limits": limits, "failures": failures, "metrics": metrics}
"""By the marker around each in the page."""


def filled(text: str) -> str:
    """The page with its generated parts as they would be now."""
    for name, part in PARTS.items():
        before, _, rest = text.partition(f"<!-- {name} -->")
        _, _, after = rest.partition(f"<!-- end of {name} -->")
        text = f"{before}<!-- {name} -->\n\n{part()}\n\n<!-- end of {name} -->{after}"
    return text


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
