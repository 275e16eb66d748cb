"""`capture`: a tape on an engine that somebody else drives."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.fit import read_shape
from kvtape.backends.llama.bystander import Bystander, is_llama
from kvtape.backends.openvino.bystander import PIPELINES, engine_version, pipeline_kind, scheduler_facts
from kvtape.backends.protocol import Clock
from kvtape.planner.rows import SessionRow
from kvtape.serve.taping.account import Account
from kvtape.serve.taping.class_taps import tapped
from kvtape.serve.taping.errors import CaptureFailed, CaptureRefused
from kvtape.serve.taping.guard import Guard, OnError
from kvtape.serve.taping.llama import Follower
from kvtape.serve.taping.llama_calls import wrap
from kvtape.serve.taping.patching import Patches
from kvtape.serve.taping.pipelines import PipelineFollower
from kvtape.serve.taping.recording import open_log
from kvtape.traces.recorder import Recorder

__all__ = ["CapturedTape", "capture"]

_SESSION = "captured"

_held: dict[int, Any] = {}
_holding = threading.Lock()


@dataclass(frozen=True, slots=True)
class CapturedTape:
    """A capture that runs. `path` of the log (in a log folder, of its segment)."""

    path: Path
    run_id: str
    _guard: Guard
    _flush: Callable[[], int]

    @property
    def error(self) -> Exception | None:
        """Why recording stopped; None while it goes on."""
        return self._guard.error

    def flush(self) -> int:
        """Return once everything recorded so far is durable; how many events those are. Raises LogWriteFailed."""
        return self._flush()


@contextmanager
def capture(
    engine: Any,
    *,
    log: str | Path,
    content: bool = False,
    check: bool = False,
    on_error: OnError = "stop",
    model: str | Path | None = None,
    scheduler: Any = None,
    clock: Clock | None = None,
) -> Iterator[CapturedTape]:
    """Record every operation on the KV cache of `engine` while the block runs; its answers stay what they are.

    `engine`: a `llama_cpp.Llama`, or an `LLMPipeline` or `ContinuousBatchingPipeline` of openvino_genai, of which only
    requests are recorded: it does not reveal what is resident. `log`: a new log, or a log folder, which gets a segment.
    `content`: store token ids too, not only their keyed hashes. `check`: read the positions of all cells back from the
    engine's memory after each change. `on_error`: what a failure of the recorder does, `stop` or `raise`; see
    `guard.OnError`.
    `model`, `scheduler`: of a pipeline, the file it was made from and its SchedulerConfig, as it reveals neither.

    At the end, also when the block raises, the engine's methods are what they were and the log is sealed. Raises
    CaptureRefused for an object that is none of these or is captured already, UnsupportedOperation for one of a
    version that is not known, and LogExists; nothing was then touched. A call from a second thread during another
    raises ConcurrentUse.
    """
    if on_error not in ("raise", "stop"):
        raise CaptureRefused(f"on_error is raise or stop, not {on_error!r}")
    kind = "Llama" if is_llama(engine) else pipeline_kind(engine)
    asked = _Asked(log, content, check, on_error, clock or MonotonicClock())
    if kind is None:
        known = ", ".join(("llama_cpp.Llama", *(f"openvino_genai.{name}" for name in PIPELINES)))
        raise CaptureRefused(f"a {type(engine).__name__} cannot be captured; give one of {known}")
    if kind == "Llama" and (model is not None or scheduler is not None):
        raise CaptureRefused("a Llama knows its model and has no scheduler: give neither")
    if kind != "Llama" and (check or content):
        raise CaptureRefused(f"{kind} reveals neither its memory nor what it computed: no check and no content there")
    with _alone(engine):
        if kind == "Llama":
            yield from _llama(engine, asked)
        else:
            yield from _pipeline(engine, kind, asked, model, scheduler)


@contextmanager
def _alone(engine: Any) -> Iterator[None]:
    """Raises CaptureRefused where the engine is captured already."""
    with _holding:
        if id(engine) in _held:
            raise CaptureRefused(f"this {type(engine).__name__} is being captured already; end that capture first")
        _held[id(engine)] = engine
    try:
        yield
    finally:
        with _holding:
            del _held[id(engine)]


@dataclass(frozen=True, slots=True)
class _Asked:
    log: str | Path
    content: bool
    check: bool
    on_error: OnError
    clock: Clock


def _llama(llama: Any, asked: _Asked) -> Iterator[CapturedTape]:
    engine, check, clock = Bystander(llama), asked.check, asked.clock
    row = engine.session_row("", _SESSION, content=asked.content)
    config = {"of": "llama_cpp.Llama", "content": asked.content, "check": check, "model": row.model_fingerprint}
    recorder = open_log(asked.log, config, "llama", engine.version, clock)
    with _sealed(recorder, asked.on_error):
        row = replace(row, run_id=recorder.run_id)
        drafter = llama.draft_model
        account = Account(
            recorder,
            clock,
            row,
            engine.n_ctx,
            speculation=None if drafter is None else f"llama_cpp:{type(drafter).__name__}",
            said={"captured": "llama_cpp.Llama"} | ({"lora": True} if llama.lora_path else {}),
        )
        follower = Follower(llama, engine, account, check=check, drafts=drafter is not None)
        guard = Guard(asked.on_error, lambda err: _stopped(err, follower, account))
        patches = Patches()
        with ExitStack() as undone:
            undone.callback(_end, guard, follower.finish, account.close)
            undone.callback(patches.undo)
            if engine.position_max() >= 0 or llama.n_tokens:
                guard.note(follower.find, "found")
            wrap(llama, engine, follower, guard, clock, patches)
            yield CapturedTape(recorder.path, recorder.run_id, guard, recorder.flush)


def _pipeline(
    pipeline: Any, kind: str, asked: _Asked, model: str | Path | None, scheduler: Any
) -> Iterator[CapturedTape]:
    shape = None if model is None else read_shape(model)
    said = {"captured": f"openvino_genai.{kind}", "residency": "unknown"}
    told = said | {"scheduler": "unknown" if scheduler is None else scheduler_facts(scheduler)}
    config = {"of": said["captured"], "model": None if shape is None else shape.fingerprint}
    version = engine_version()
    recorder = open_log(asked.log, config, "openvino-genai", version, asked.clock)
    row = SessionRow(
        run_id=recorder.run_id,
        session_id="",
        backend="openvino-genai",
        engine_version=version,
        model_fingerprint=None if shape is None else shape.fingerprint,
        model_name=None if model is None else Path(model).name,
        cold_budget_bytes=None,
        content=False,
    )
    with _sealed(recorder, asked.on_error):
        guard = Guard(asked.on_error, lambda err: _given_up(err, follower))
        follower = PipelineFollower(pipeline, recorder, asked.clock, row, told, guard)
        with ExitStack() as undone:
            undone.callback(_end, guard, follower.finish)
            undone.enter_context(tapped(pipeline, follower.listeners()))
            yield CapturedTape(recorder.path, recorder.run_id, guard, recorder.flush)


def _end(guard: Guard, *steps: Callable[[], None]) -> None:
    with guard.call("the end of the capture"):
        for step in steps:
            guard.note(step)
        guard.end()


def _given_up(err: Exception, follower: PipelineFollower) -> None:
    with suppress(Exception):
        follower.lost(err)


def _stopped(err: Exception, follower: Follower, account: Account) -> None:
    """What is known is written, then that nothing is known from here on; where even that fails, the warning says it."""
    with suppress(Exception):
        follower.finish()
    with suppress(Exception):
        account.lost(err)


@contextmanager
def _sealed(recorder: Recorder, on_error: OnError) -> Iterator[None]:
    """Seal at the end; what the block raised is the error to see."""
    try:
        yield
    except BaseException:
        with suppress(Exception):
            recorder.seal()
        raise
    try:
        recorder.seal()
    except Exception as err:
        text = f"kvtape could not seal the log: {err}"
        if on_error == "raise":
            raise CaptureFailed(text) from err
        warnings.warn(text, RuntimeWarning, stacklevel=6)
