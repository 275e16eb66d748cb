"""The log that a capture writes: one run, sealed at the end."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvtape.backends.protocol import Clock
from kvtape.planner.rows import RunRow
from kvtape.traces.recorder import Recorder

__all__ = ["open_log"]


def open_log(log: str | Path, asked: Mapping[str, Any], engine: str, engine_version: str, clock: Clock) -> Recorder:
    """A recorder on a new log, or on a new segment of a log folder. Raises LogExists and what the recorder raises."""
    began = clock.now_ns()
    config = json.dumps({**asked, "verb": "capture", "started_at_ns": began}, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(config.encode()).hexdigest()
    run = RunRow(
        run_id=f"captured-{digest[:12]}",
        kind="live",
        config_digest=digest,
        config=config,
        kvtape_version=version("kvtape"),
        engine_versions=json.dumps({engine: engine_version}),
        started_at_ns=began,
    )
    return Recorder(log, run, clock=clock)
