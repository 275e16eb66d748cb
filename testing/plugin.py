"""The pytest plugin: `pytest --kvtape-backend module:factory` runs the conformance suite on that backend.

Each scenario is one test item, `conformance::NAME`; `-k`, `-x` and reports work as ever. `--kvtape-evidence FILE`
writes what the tests of the parity contract came to. Without the options the plugin does nothing, and imports nothing
of kvtape.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from kvtape.testing.conformance import Laboratory, Scenario

__all__ = [
    "ConformanceItem",
    "ConformanceSuite",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
]

_OPTION = "--kvtape-backend"
_EVIDENCE = "--kvtape-evidence"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvtape", "conformance of kvtape backends")
    group.addoption(
        _OPTION,
        action="append",
        default=[],
        metavar="MODULE:FACTORY",
        help="run kvtape's conformance suite on the backend that factory(config) opens; repeatable. Without paths only "
        "the suite is run.",
    )
    group.addoption(_EVIDENCE, metavar="FILE", help="write what the tests marked `contract` came to, for kvtape doctor")


def pytest_configure(config: pytest.Config) -> None:
    """Where no path was asked for, the conformance suite alone is meant."""
    if config.getoption(_OPTION) and config.args_source is not pytest.Config.ArgsSource.ARGS:
        config.args = []
    if config.getoption(_EVIDENCE):
        from pathlib import Path

        from kvtape.testing.evidence import EvidenceRecorder

        path = Path(config.getoption(_EVIDENCE)).absolute()
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise pytest.UsageError(
                f"{_EVIDENCE} {path}: no file can be written there; give a file in a folder that is there"
            )
        config.pluginmanager.register(EvidenceRecorder(path), "kvtape-evidence")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the scenarios, before `-k` picks among all items."""
    for text in config.getoption(_OPTION):
        suite = ConformanceSuite.from_parent(session, name=f"conformance[{text}]", nodeid=f"conformance[{text}]")
        items += suite.collect()


class ConformanceSuite(pytest.Collector):
    """The scenarios on one backend."""

    def collect(self) -> list[pytest.Item]:
        from kvtape.backends.errors import UsageError
        from kvtape.testing.conformance import SCENARIOS, Laboratory, load_factory

        text = self.name.removeprefix("conformance[").removesuffix("]")
        # As `python -m pytest` has it: a factory in the folder where pytest was started is found.
        if str(self.config.invocation_params.dir) not in sys.path:
            sys.path.insert(0, str(self.config.invocation_params.dir))
        try:
            laboratory = Laboratory(load_factory(text))
        except UsageError as err:
            raise pytest.UsageError(str(err)) from None
        return [
            ConformanceItem.from_parent(self, name=scenario.name, scenario=scenario, laboratory=laboratory)
            for scenario in SCENARIOS
        ]


class ConformanceItem(pytest.Item):
    """One scenario; fails with one line that says what is wrong."""

    def __init__(self, *, scenario: Scenario, laboratory: Laboratory, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._scenario, self._laboratory = scenario, laboratory

    def runtest(self) -> None:
        from kvtape.testing.conformance import NotApplicable

        try:
            self._laboratory.run(self._scenario)
        except NotApplicable as err:
            pytest.skip(str(err))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from kvtape.testing.conformance import NotConforming

        if isinstance(excinfo.value, NotConforming) and not self.config.getoption("fulltrace"):
            return f"{self._scenario.what}\n{excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, None, str]:
        return "kvtape.testing.conformance", None, f"conformance: {self.name}"
