"""What the pages take for granted, made once: a log is recorded for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.page_runs import prepare


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be copied, not written to."""
    folder = tmp_path_factory.mktemp("page")
    prepare(folder)
    return folder
