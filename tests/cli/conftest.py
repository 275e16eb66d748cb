"""One tiny model and one recorded log for all tests of the commands."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.recorded import record
from support.tiny_gguf import write_tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.fixture(scope="session")
def log(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("log") / "recorded.duckdb"
    ran = record(model, path, "--content")
    assert ran.code == 0, ran.err
    return path
