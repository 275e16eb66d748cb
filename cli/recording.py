"""Opening what a recording needs, and ending it so that the log is whole whatever happened."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kvtape.backends.errors import UsageError
from kvtape.cli.output import canonical_json, kvtape_version
from kvtape.planner.rows import RunRow

if TYPE_CHECKING:
    from kvtape.backends.protocol import Clock, Engine
    from kvtape.backends.session import Session
    from kvtape.traces.recorder import Recorder

__all__ = ["interruptible", "live_run", "recording", "require_new"]


def live_run(config: Mapping[str, Any], engine: Engine, clock: Clock) -> RunRow:
    """The run's row; its id comes from its configuration, so that a recording repeated is the same run."""
    text = canonical_json(config)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return RunRow(
        run_id=f"live-{digest[:12]}",
        kind="live",
        config_digest=digest,
        config=text,
        seed=None,
        kvtape_version=kvtape_version(),
        engine_versions=json.dumps({engine.name: engine.version}, sort_keys=True),
        started_at_ns=clock.now_ns(),
    )


def require_new(log: Path) -> None:
    """Raises UsageError before any work is done when the log could not be created."""
    if log.exists():
        raise UsageError(f"{log}: exists already, and a log is never overwritten; choose another name or remove it")
    if not log.parent.is_dir():
        raise UsageError(f"{log.parent}: no such folder; create it first")


@contextmanager
def recording(log: Path, run: RunRow, clock: Clock) -> Iterator[Recorder]:
    """A recorder on a new log, sealed at the end, also when the block raises: what was recorded stays readable."""
    from kvtape.traces.errors import LogWriteFailed
    from kvtape.traces.recorder import Recorder

    recorder = Recorder(log, run, clock=clock)
    try:
        yield recorder
    except BaseException:
        with suppress(LogWriteFailed):  # the first error is the one to see
            recorder.seal()
        raise
    recorder.seal()


@contextmanager
def interruptible(session: Session) -> Iterator[None]:
    """Ctrl-C asks the session to stop where its state is whole; a second Ctrl-C interrupts at once."""

    def ask(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        session.cancel()

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
