"""docs/certification.md says what the shipped rows and the table of thresholds say."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from kvtape.backends.proofs.store import Proofs, shipped_rows
from support.repository import ROOT

pytestmark = pytest.mark.contract("I5")


def writer() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_certification", ROOT / "docs" / "write_certification.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_would_be_written_now() -> None:
    page = writer()
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "docs/certification.md is stale; write it with: make docs"


def test_every_shipped_certification_is_in_the_page() -> None:
    text = (ROOT / "docs" / "certification.md").read_text(encoding="utf-8")
    for row in Proofs(shipped_rows()).current("certification"):
        assert f"`{row.subject}`" in text, row.subject
