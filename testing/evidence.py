"""`pytest --kvtape-evidence FILE`: what the tests marked `contract("I1")` to `contract("I7")` came to, for `doctor`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtape.replay.evidence import sources_digest, write_evidence

__all__ = ["EvidenceRecorder"]


class EvidenceRecorder:
    """A pytest plugin of its own; registered by `kvtape.testing.plugin` when it is asked for.

    A mark `contract("I1", cell=True)` says that the test is a cell of a matrix; of several marks the closest counts.
    A run that is interrupted or breaks down writes nothing. What it never came to (`-x`) and how it was narrowed down
    without a word to plugins (`FILE::test`, `--lf`) is written as well: such a run proves nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Of now, before anything runs: sources that are edited meanwhile must not pass for those that were tested.
        self._sources = sources_digest()
        self._tests: dict[str, dict[str, Any]] = {}
        self._deselected: Counter[str] = Counter()
        self._narrowed: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        config = session.config
        self._narrowed = [arg for arg in config.args if "::" in arg]
        if config.getoption("lf", default=False):
            self._narrowed.append("--lf")
        for item in session.items:
            mark = item.get_closest_marker("contract")
            if mark is not None:
                self._tests[item.nodeid] = {
                    "id": item.nodeid,
                    "invariant": mark.args[0],
                    "cell": bool(mark.kwargs.get("cell")),
                    "outcome": "not run",
                }

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        marks = (item.get_closest_marker("contract") for item in items)
        self._deselected.update(str(mark.args[0]) for mark in marks if mark is not None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        test = self._tests.get(report.nodeid)
        if test is None:
            return
        if report.failed:
            test["outcome"] = "failed"
        elif report.skipped and test["outcome"] != "failed":
            test["outcome"] = "skipped"
        elif report.when == "call" and test["outcome"] == "not run":
            test["outcome"] = "passed"

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            tests = [self._tests[name] for name in sorted(self._tests)]
            write_evidence(self._path, tests, dict(sorted(self._deselected.items())), self._narrowed, self._sources)
