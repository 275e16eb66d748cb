"""A log in memory that takes the trials of an evaluation too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtape.planner.rows import TrialRow
from kvtape.testing.sink import ListSink

__all__ = ["TrialListSink"]


@dataclass
class TrialListSink(ListSink):
    """A `TrialSink`; sessions share one list of events."""

    trials: list[TrialRow] = field(default_factory=list)

    def add_trials(self, rows: Sequence[TrialRow]) -> None:
        self.trials += rows
