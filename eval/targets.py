"""What an evaluation runs on, and where its events and results go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.feasible import check_policy, check_precision, may_recompute
from kvtape.backends.protocol import Backend, Clock, Engine, EventSink, SessionConfig
from kvtape.backends.session import Session
from kvtape.backends.sinks import WatchingSink
from kvtape.planner.rows import TrialRow
from kvtape.planner.specs import PolicySpec

__all__ = ["NullSink", "Target", "TrialSink", "World", "check_target"]


class TrialSink(EventSink, Protocol):
    """A log that also takes the outcome of trials (`traces.recorder.Recorder`)."""

    def add_trials(self, rows: Sequence[TrialRow]) -> None: ...


class NullSink(WatchingSink):
    """Keeps nothing: an evaluation without a log."""

    def add_trials(self, rows: Sequence[TrialRow]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded engine: `spec` as asked; `config.n_ctx` is set by the task; `evict_by` as in `Session`."""

    spec: str
    engine: Engine
    config: SessionConfig
    evict_by: str = "native"


def check_target(target: Target, policies: Iterable[PolicySpec], n_ctx: int, *, scores: bool = False) -> None:
    """Open a context as the trials will, and close it again: what cannot run is found before a log exists.

    Raises UnsupportedOperation where nothing can be evicted or, with `scores`, measured; SpecError, UsageError and
    EnvironmentProblem as opening does.
    """
    backend = target.engine.open(replace(target.config, n_ctx=n_ctx))
    try:
        able = backend.capabilities
        if scores and not able.attention_scores:
            raise UnsupportedOperation("score", backend.refusal("attention_scores") or "no attention_scores")
        precision = check_precision(backend)
        for policy in policies:
            check_policy(policy, backend, evict_by=target.evict_by, precision=precision)
            # Else every row would be dense under another name.
            if policy.evicts and not policy.ways(able, may_recompute(backend, target.evict_by)):
                why = backend.refusal("remove_middle") or "no way to carry it out"
                raise UnsupportedOperation(f"evicting on {target.spec}", why)
    finally:
        backend.close()


@dataclass(slots=True)
class World:
    """What the trials of one run share: the log, the clock, and the number of the next trial."""

    sink: TrialSink
    clock: Clock
    run_id: str
    content: bool = False
    next_trial: int = 0

    def session(
        self,
        target: Target,
        policy: PolicySpec,
        session_id: str,
        n_ctx: int,
        sink: EventSink | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Session:
        """A session on a context of its own; `sink` stands before the log's, `extra` is what else `Session` is given.

        Raises UsageError, UnsupportedOperation, EnvironmentProblem.
        """
        backend = target.engine.open(replace(target.config, n_ctx=n_ctx))
        return self.session_on(backend, policy, session_id, sink, evict_by=target.evict_by, **(extra or {}))

    def session_on(
        self, backend: Backend, policy: PolicySpec, session_id: str, sink: EventSink | None = None, **extra: Any
    ) -> Session:
        """As `session`, on a backend that is open; one that takes no session is closed."""
        try:
            return Session(
                backend,
                policy,
                self.sink if sink is None else sink,
                self.clock,
                run_id=self.run_id,
                session_id=session_id,
                content=self.content,
                **extra,
            )
        except BaseException:
            backend.close()
            raise

    def number(self) -> int:
        self.next_trial += 1
        return self.next_trial - 1
