"""Opening what a recording needs, and ending it so that the log is whole whatever happened."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, Self

from kvtape.backends.errors import UsageError
from kvtape.cli.output import canonical_json, kvtape_version, report_digest
from kvtape.planner.rows import RunRow

if TYPE_CHECKING:
    from kvtape.backends.protocol import Clock
    from kvtape.backends.session import Session
    from kvtape.traces.recorder import Recorder

__all__ = ["interruptible", "live_run", "new_log", "recording", "require_folder", "require_new", "run_row"]


class _Named(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def version(self) -> str: ...


def live_run(
    config: Mapping[str, Any], engine: _Named, clock: Clock, *, log: Path | None = None, prompt: Sequence[int] = ()
) -> RunRow:
    """The run's row; its id comes from configuration and prompt, so that a recording repeated is the same run.

    The prompt comes in under the key of the folder of `log`: from an id nobody can test a guess at what was said.
    """
    row = run_row("live", config, {engine.name: engine.version}, clock.now_ns())
    return row if log is None else replace(row, run_id=f"live-{_keyed(log, row.config_digest, prompt)}")


def run_row(
    kind: str, config: Mapping[str, Any], engines: Mapping[str, str], started_at_ns: int, *, prefix: str | None = None
) -> RunRow:
    """A run's row. Its id is `prefix`, or else `kind`, and the digest of `config`; `engines`: versions by name."""
    digest = report_digest(config)
    return RunRow(
        run_id=f"{prefix or kind}-{digest[:12]}",
        kind=kind,
        config_digest=digest,
        config=canonical_json(config),
        kvtape_version=kvtape_version(),
        engine_versions=json.dumps(engines, sort_keys=True),
        started_at_ns=started_at_ns,
    )


def _keyed(log: Path, config_digest: str, prompt: Sequence[int]) -> str:
    from kvtape.traces.folder import is_log_folder
    from kvtape.traces.keys import load_or_create_key

    # In a log folder a run that is recorded again is another run: a session has one segment.
    again = log.name if is_log_folder(log.parent) else ""
    said = config_digest + canonical_json(list(prompt)) + again
    return hashlib.blake2b(said.encode(), digest_size=6, key=load_or_create_key(log)).hexdigest()


def new_log(log: Path) -> Path:
    """The path to record into: `log`, or in a log folder (or an empty one) that of a new segment.

    Raises as `require_new`, and NotALog for another folder.
    """
    from kvtape.traces.folder import new_segment

    if log.is_dir():
        return new_segment(log)
    require_new(log)
    return log


def require_new(log: Path) -> None:
    """Raises UsageError before any work is done when the log could not be created."""
    if log.exists():
        raise UsageError(f"{log}: exists already, and a log is never overwritten; choose another name or remove it")
    require_folder(log)


def require_folder(log: Path) -> None:
    """Raises UsageError where there is no folder for the log."""
    if not log.parent.is_dir():
        raise UsageError(f"{log.parent}: no such folder; create it first")


@contextmanager
def recording(log: Path, run: RunRow, clock: Clock, *, max_latency_s: float = 0.05) -> Iterator[Recorder]:
    """A recorder on a new log, sealed at the end, also when the block raises: what was recorded stays readable.

    `max_latency_s`: see `Recorder`. Ctrl-C waits while the log is made and while it is sealed.
    """
    from kvtape.traces.errors import LogWriteFailed
    from kvtape.traces.recorder import Recorder

    with _HeldInterrupts() as interrupts:
        recorder = Recorder(log, run, clock=clock, max_latency_s=max_latency_s)
        try:
            with interrupts.let_through():
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


class _HeldInterrupts:
    """While this context is open a Ctrl-C is kept, and raised as KeyboardInterrupt at its end."""

    def __init__(self) -> None:
        self._came = False
        self._holding = True

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Who took the signal over in the block, and means to keep it, gives it back himself.
        if signal.getsignal(signal.SIGINT) == self._take:
            signal.signal(signal.SIGINT, self._before)
        if kind is None and self._came:
            raise KeyboardInterrupt

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """In this block a Ctrl-C, also one that came before it, interrupts at once."""
        self._holding = False
        try:
            if self._came:
                raise KeyboardInterrupt
            yield
        finally:
            self._holding = True

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        if not self._holding:
            raise KeyboardInterrupt
