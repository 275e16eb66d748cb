"""`pytest --kvtape-evidence FILE`: what the tests marked `contract("I1")` to `contract("I7")` came to, for `doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtape.replay.evidence import write_evidence

__all__ = ["EvidenceRecorder"]

_INVARIANT, _CELL = "kvtape_contract", "kvtape_cell"


class EvidenceRecorder:
    """A pytest plugin of its own; registered by `kvtape.testing.plugin` when it is asked for.

    A mark `contract("I1", cell=True)` says that the test is a cell of a matrix; of several marks the closest counts.
    A run that is interrupted or breaks down writes nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._tests: dict[str, dict[str, Any]] = {}
        self._deselected: Counter[str] = Counter()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = item.get_closest_marker("contract")
            if mark is not None:
                item.user_properties.append((_INVARIANT, mark.args[0]))
                item.user_properties.append((_CELL, bool(mark.kwargs.get("cell"))))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        marks = (item.get_closest_marker("contract") for item in items)
        self._deselected.update(str(mark.args[0]) for mark in marks if mark is not None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if _INVARIANT not in properties:
            return
        test = self._tests.setdefault(
            report.nodeid,
            {
                "id": report.nodeid,
                "invariant": properties[_INVARIANT],
                "cell": properties[_CELL],
                "outcome": "passed",
            },
        )
        if report.failed:
            test["outcome"] = "failed"
        elif report.skipped and test["outcome"] != "failed":
            test["outcome"] = "skipped"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            tests = [self._tests[name] for name in sorted(self._tests)]
            write_evidence(self._path, tests, dict(sorted(self._deselected.items())))
