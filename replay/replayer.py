"""Replaying a log: every session on every target, judged event by event, then backend by backend, then by numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import Engine
from kvtape.backends.registry import open_engine as registry_open
from kvtape.capacity.model import read_model
from kvtape.planner.events import Event
from kvtape.planner.layout import Layout, resident_ranges
from kvtape.planner.rows import SessionRow, TokensRow
from kvtape.replay.dense import DenseModel, reference_logits
from kvtape.replay.findings import Finding, Gate
from kvtape.replay.numbers import Agreement, compare_logits, kl_nats, merge
from kvtape.replay.report import BackendReport, ReplayReport, SessionReport
from kvtape.replay.runner import Progress, SessionRun, run_session
from kvtape.replay.story import Divergence, Story, read_story
from kvtape.replay.targets import Target, parse_target
from kvtape.replay.weights import ModelNotCovered, Weights

__all__ = ["OpenEngine", "RecordedLog", "replay"]

OpenEngine = Callable[[str, Path, Mapping[str, str]], Engine]
REFERENCE = "numpy float32, one forward over the way's own lineage"


class RecordedLog(Protocol):
    """What replay reads of a log; `traces.reader.Log` has it."""

    def default_run(self) -> str: ...

    def sessions(self, run_id: str) -> Sequence[SessionRow]: ...

    def events(self, run_id: str, session_id: str) -> Sequence[Event]: ...

    def tokens(self, run_id: str, session_id: str) -> Mapping[int, TokensRow]: ...

    def logical_digest(self, run_id: str) -> str: ...
