"""docs/http-api.md says what the server's tables say."""

from __future__ import annotations

import runpy

from kvtape.serve.counting import COUNTERS
from kvtape.serve.http.failures import FAILURES
from kvtape.serve.http.metrics import GAUGES
from support.repository import ROOT


def test_the_page_is_what_would_be_written_now() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "write_http_api.py"))
    text = page["PAGE"].read_text(encoding="utf-8")
    assert page["filled"](text) == text, "docs/http-api.md is stale; write it with: make docs"


def test_every_failure_and_every_metric_is_in_it() -> None:
    text = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    for name in [*FAILURES, *GAUGES, *(f"kvtape:{counter}_total" for counter in COUNTERS)]:
        assert f"`{name}`" in text, name
