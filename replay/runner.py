"""One session on one backend, from open to its end or its first divergence."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from kvtape.backends.errors import KvtapeError, UnsupportedOperation
from kvtape.backends.protocol import Backend, Engine, Logits
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.events import Event, Op
from kvtape.planner.layout import Layout, normalise
from kvtape.planner.opening import opening_of
from kvtape.planner.residency import RESIDENCY_OPS, ResidencyState
from kvtape.planner.residency_state import UNBOUNDED
from kvtape.replay.checkpoints import Checkpoint, plan_checkpoints
from kvtape.replay.covered import key_storage
from kvtape.replay.findings import Finding, Tolerances
from kvtape.replay.judge import Judge
from kvtape.replay.lineage import LineageBuilder
from kvtape.replay.performer import Performer
from kvtape.replay.story import Divergence, Story
from kvtape.replay.targets import Target

__all__ = ["Progress", "SessionRun", "run_session"]

Progress = Callable[[str, int, int], None]
"""Called with the session, the seq that is done and how many events there are."""


@dataclass(slots=True)
class SessionRun:
    """What one session on one backend showed.

    `layouts`: the backend's books after each residency-changing event, where they are a layout; `logits` float32
    `[n_vocab]` at each checkpoint that was reached. `witness_unclear`: rows whose key rounding left between two tokens.
    `remove_tail`: whether truncations were carried out without a
    rebuild.
    """

    tolerances: Tolerances
    kv_types: str
    remove_tail: bool
    events_compared: int = 0
    residency_events: int = 0
    witness_positions: int = 0
    witness_rows: int = 0
    witness_identities: int = 0
    witness_unclear: int = 0
    not_executed: int = 0
    layouts: dict[int, Layout] = field(default_factory=dict)
    logits: dict[Checkpoint, Logits] = field(default_factory=dict)
    divergence: Divergence | None = None


def run_session(
    story: Story, target: Target, engine: Engine, weights: Weights | None, progress: Progress | None = None
) -> SessionRun:
    """Replay `story` on a new backend of `engine`.

    Raises UnsupportedOperation when the backend has no such operation on this way; everything else that a backend
    does wrong is the run's divergence.
    """
    precision = opening_of(story.events).precision
    backend = engine.open(target.session_config(story.row, *story.peaks(), precision=precision))
    try:
        return _Run(story, target, backend, weights).play(progress)
    finally:
        backend.close()


class _Run:
    def __init__(self, story: Story, target: Target, backend: Backend, weights: Weights | None) -> None:
        # Without weights nothing is identified, so that tolerance is never used.
        storage = key_storage(weights) if weights else "quantised"
        tolerances = Tolerances.of(weights=storage, kv_type_k=backend.config.kv_type_k)
        self._story, self._target, self._backend = story, target, backend
        remove_tail = backend.capabilities.remove_tail
        self._lineage = LineageBuilder(target.lineage_way, remove_tail=remove_tail)
        # What a model makes of drawn tokens says nothing of what it made of the recorded ones.
        places = frozenset[Checkpoint]() if story.surrogate else plan_checkpoints(story.events)
        self._performer = Performer(backend, self._lineage, places, story.tokens)
        self._judge = Judge(weights, story.distinct_tokens(), tolerances)
        self._result = SessionRun(tolerances, f"{backend.config.kv_type_k}/{backend.config.kv_type_v}", remove_tail)
        self._alive = True

    def play(self, progress: Progress | None) -> SessionRun:
        story, result = self._story, self._result
        before = ResidencyState()
        for event, after in zip(story.events, story.states, strict=True):
            findings = self._one(event, before, after)
            if findings:
                result.divergence = story.diverged(event, self._target.spec, findings[0])
                break
            result.events_compared += 1
            before = after
            if progress is not None:
                progress(story.session_id, event.seq, len(story.events))
        result.logits = self._performer.logits
        return result

    def _one(self, event: Event, before: ResidencyState, after: ResidencyState) -> list[Finding]:
        try:
            return self._execute(event, before, after)
        except UnsupportedOperation as err:
            where = f"session {self._story.session_id} seq {event.seq} ({event.op})"
            hint = "; try way=recompute" if self._target.way == "native" else ""
            raise UnsupportedOperation(f"{where} on {self._target.spec}", f"{err}{hint}") from err
        except KvtapeError as err:
            return [Finding(f"{type(err).__name__}: {err}")]

    def _execute(self, event: Event, before: ResidencyState, after: ResidencyState) -> list[Finding]:
        if event.op == Op.OPEN:
            return self._opened(after)
        if event.op in (Op.REFUSE, Op.FATAL) or not self._alive:
            self._result.not_executed += 1
            if event.op == Op.FATAL:
                self._end()
            return self._look(event) if self._alive else []
        if event.op == Op.CLOSE:
            self._end()
            return []
        findings = self._performer.perform(event, before, after)
        if event.op not in RESIDENCY_OPS and event.op != Op.SNAPSHOT:
            return findings
        self._result.residency_events += event.op in RESIDENCY_OPS
        return [*findings, *self._look(event)]

    def _opened(self, after: ResidencyState) -> list[Finding]:
        if after.n_ctx in (self._backend.n_ctx, UNBOUNDED):
            return []
        return [Finding(f"open: the context holds {self._backend.n_ctx} tokens, the log says {after.n_ctx}")]

    def _end(self) -> None:
        self._alive = False
        self._backend.close()

    def _look(self, event: Event) -> list[Finding]:
        verdict = self._judge.look(self._lineage, self._backend)
        result = self._result
        result.witness_rows += verdict.rows
        result.witness_identities += verdict.identified
        result.witness_unclear += verdict.unclear
        if event.op in RESIDENCY_OPS:
            result.witness_positions += verdict.positions_agree
            # Also where something was found: what two backends hold is compared whatever each was told to hold.
            with suppress(ValueError):
                result.layouts[event.seq] = normalise(self._backend.books())
        return list(verdict.findings)
