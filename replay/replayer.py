"""Replaying a log: every session on every target, judged event by event, then backend by backend, then by numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from threadpoolctl import threadpool_limits

from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import Engine
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.registry import open_engine as registry_open
from kvtape.backends.rounding import PACKED_TYPES
from kvtape.capacity.fingerprint import fingerprint_difference, has_weights, of_folder
from kvtape.capacity.model import read_model
from kvtape.planner.events import Event
from kvtape.planner.rows import RunRow, SessionRow, TokensRow
from kvtape.replay.covered import ModelNotCovered, covered_weights
from kvtape.replay.findings import Gate
from kvtape.replay.references import References
from kvtape.replay.report import BackendReport, ReplayReport, SessionReport
from kvtape.replay.runner import Progress, SessionRun, run_session
from kvtape.replay.story import Divergence, Story, read_story
from kvtape.replay.surrogates import text_ids, with_surrogates
from kvtape.replay.targets import Target, parse_target
from kvtape.replay.verdicts import SessionNumbers, below_gate, between_backends, rounding_notes, session_numbers

__all__ = ["OpenEngine", "RecordedLog", "replay"]

OpenEngine = Callable[[str, Path, Mapping[str, str]], Engine]
REFERENCE = "the reference in float32, one forward over the way's own lineage"


class RecordedLog(Protocol):
    """What replay reads of a log; `traces.reader.Log` has it."""

    def default_run(self) -> RunRow: ...

    def sessions(self, run_id: str) -> Sequence[SessionRow]: ...

    def events(self, run_id: str, session_id: str) -> Sequence[Event]: ...

    def tokens(self, run_id: str, session_id: str) -> Mapping[int, TokensRow]: ...

    def logical_digest(self, run_id: str) -> str: ...


def replay(
    log: RecordedLog,
    targets: Sequence[str],
    model_path: str | Path | None = None,
    *,
    open_engine: OpenEngine = registry_open,
    progress: Progress | None = None,
    gate: Gate | None = None,
) -> ReplayReport:
    """Replay the default run of `log` on each target spec.

    A session without content is replayed with surrogate tokens. Raises SpecError and UsageError for what is asked
    wrongly (no target, no model, a log with neither content nor hashes, or of another model), EnvironmentProblem where
    an engine is missing, UnsupportedOperation where one cannot follow on this way. What an engine does wrong is in the
    report.
    """
    parsed = [parse_target(text) for text in targets]
    if not parsed:
        raise UsageError("nothing to replay on; name a backend, for example --on llama")
    if model_path is None:
        raise UsageError("a replay needs the model that was recorded; give its file with --model")
    run = log.default_run()
    rows = log.sessions(run.run_id)
    if not rows:
        raise UsageError(f"run {run.run_id} has no session to replay")
    model, gate = _Model(Path(model_path)), gate or Gate()
    stories = [_story(log, run.run_id, row, model) for row in rows]
    digest = log.logical_digest(run.run_id)
    if model.weights is None:
        done = [_run_target(target, stories, model, open_engine, progress) for target in parsed]
        return _report(run, digest, stories, done, model, gate, [[] for _ in done])
    # One BLAS thread: the sums come out in one order whatever the machine, and the engines keep their cores.
    with (
        threadpool_limits(limits=1, user_api="blas"),
        References(model.weights, stories, [target.lineage_way for target in parsed]) as references,
    ):
        done = [_run_target(target, stories, model, open_engine, progress) for target in parsed]
        numbers = [
            [session_numbers(references, gate, i, d.target, session) for i, session in enumerate(d.runs)] for d in done
        ]
    return _report(run, digest, stories, done, model, gate, numbers)


def _story(log: RecordedLog, run_id: str, row: SessionRow, model: _Model) -> Story:
    """The session, with surrogates where the log has no content."""
    _require_same_model(row, model)
    events, tokens = log.events(run_id, row.session_id), log.tokens(run_id, row.session_id)
    if all(entry.tokens is not None for entry in tokens.values()):
        return read_story(row, events, tokens)
    drawn = with_surrogates(row.session_id, events, tokens, model.text_ids)
    return read_story(row, events, drawn, surrogate=True)


class _Model:
    """The model file: its fingerprint, its weights where the reference covers it, else the reason why not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.weights: Weights | None = None
        self.reason: str | None = None
        try:
            self.weights = covered_weights(path)
            self.fingerprint = self.weights.architecture.shape.fingerprint
        except ModelNotCovered as err:
            self.reason = str(err)
            self.fingerprint = read_model(path).fingerprint

    @cached_property
    def text_ids(self) -> npt.NDArray[np.int64]:
        """What surrogates are drawn from; read once, by the first session without content."""
        return text_ids(self.path, read_model(self.path).n_vocab)


def _require_same_model(row: SessionRow, model: _Model) -> None:
    if row.model_fingerprint is None:  # imported: its source names no file
        return
    differ = fingerprint_difference(row.model_fingerprint, model.fingerprint)
    if not differ or _of_another_format(row.model_fingerprint, model):
        return
    raise UsageError(
        f"session {row.session_id} was recorded with another model ({row.model_name}) than {model.path.name}: "
        f"different {', '.join(differ)}; give that model with --model"
    )


def _of_another_format(recorded: str, model: _Model) -> bool:
    """Is one a GGUF and the other an OpenVINO model directory? Of the same weights or not, no fingerprint can tell."""
    return of_folder(recorded) != of_folder(model.fingerprint)


@dataclass(frozen=True, slots=True)
class _TargetRuns:
    """All sessions on one target."""

    target: Target
    engine_version: str
    runs: list[SessionRun]


def _run_target(
    target: Target, stories: Sequence[Story], model: _Model, open_engine: OpenEngine, progress: Progress | None
) -> _TargetRuns:
    engine = open_engine(target.engine, model.path, target.options)
    try:
        runs = [run_session(story, target, engine, model.weights, progress) for story in stories]
        return _TargetRuns(target, engine.version, runs)
    finally:
        engine.close()


def _report(
    run: RunRow,
    log_digest: str,
    stories: Sequence[Story],
    done: Sequence[_TargetRuns],
    model: _Model,
    gate: Gate,
    numbers: Sequence[Sequence[SessionNumbers]],
) -> ReplayReport:
    targets = [d.target for d in done]
    candidates: list[tuple[int, Divergence]] = []
    for i, story in enumerate(stories):
        runs = [d.runs[i] for d in done]
        found = [story.divergence, *(run.divergence for run in runs), between_backends(story, targets, runs)]
        candidates += [(i, d) for d in found if d is not None]
    first = min(candidates, key=lambda c: (c[0], c[1].seq), default=(0, None))[1]
    if first is None:
        failed = (below_gate(gate, t, stories, n) for t, n in zip(targets, numbers, strict=True))
        first = next((d for d in failed if d is not None), None)
    return ReplayReport(
        config_digest=run.config_digest,
        seed=run.seed,
        log_digest=log_digest,
        model=model.fingerprint,
        first_divergence=first,
        backends=tuple(_backend(d, n, model) for d, n in zip(done, numbers, strict=True)),
        sessions=tuple(_session(i, story, targets, numbers) for i, story in enumerate(stories)),
        notes=(
            *_notes(stories, model),
            *_storage_notes(stories, done),
            *(note for t, n in zip(targets, numbers, strict=True) for note in rounding_notes(gate, t, stories, n)),
        ),
        gate=gate,
    )


def _backend(done: _TargetRuns, numbers: Sequence[SessionNumbers], model: _Model) -> BackendReport:
    runs = done.runs
    return BackendReport(
        name=done.target.spec,
        way=done.target.way,
        engine_version=done.engine_version,
        kv_types=runs[0].kv_types,
        events_compared=sum(r.events_compared for r in runs),
        residency_events=sum(r.residency_events for r in runs),
        witness_positions=sum(r.witness_positions for r in runs),
        witness_rows=sum(r.witness_rows for r in runs),
        witness_identities=sum(r.witness_identities for r in runs),
        witness_unclear=sum(r.witness_unclear for r in runs),
        not_executed=sum(r.not_executed for r in runs),
        agreements=tuple(n.agreement for n in numbers),
        roundings=tuple(n.rounding for n in numbers),
        reference=None if model.weights is None else REFERENCE,
        reference_reason=model.reason,
        tolerances=runs[0].tolerances,
        diverged=any(r.divergence is not None for r in runs),
    )


def _session(
    i: int, story: Story, targets: Sequence[Target], numbers: Sequence[Sequence[SessionNumbers]]
) -> SessionReport:
    told = {t.spec: n[i] if n else SessionNumbers(None, None) for t, n in zip(targets, numbers, strict=True)}
    return SessionReport(
        *(story.session_id, story.n_events, len(story.events), story.lost_at),
        agreements={spec: n.agreement for spec, n in told.items()},
        roundings={spec: n.rounding for spec, n in told.items()},
    )


def _notes(stories: Sequence[Story], model: _Model) -> list[str]:
    notes = [
        f"session {s.session_id}: no content in the log; replayed with surrogate tokens drawn from its keyed hashes: "
        "residency and the identity of surrogates are checked, logits are not compared"
        for s in stories
        if s.surrogate
    ]
    notes += [
        f"session {s.session_id}: events were lost at seq {s.lost_at}; compared up to there"
        for s in stories
        if s.lost_at is not None
    ]
    notes += [
        f"session {s.session_id}: its log is from before weights were part of a fingerprint; that they are the same is "
        "not known"
        for s in stories
        if s.row.model_fingerprint is not None and not has_weights(s.row.model_fingerprint)
    ]
    notes += [
        f"session {s.session_id}: recorded on {s.row.model_name} ({s.row.model_fingerprint}), and {model.path.name} is "
        "another file, in another format; that it holds the same weights is your word: rows are identified by, and "
        f"logits compared with, those of {model.path.name}"
        for s in stories
        if s.row.model_fingerprint is not None and _of_another_format(s.row.model_fingerprint, model)
    ]
    if model.reason is not None:
        notes.append(
            f"not covered: {model.reason}; no row is identified and no logits are compared, so this is not `equal`; "
            "`residency_equal` says whether positions, rows and books agree"
        )
    return notes


def _storage_notes(stories: Sequence[Story], done: Sequence[_TargetRuns]) -> Iterator[str]:
    """What is to be known of coarse rows: that a backend stores others, that they do not tell tokens apart."""
    recorded = sorted({f"{s.row.kv_type_k}/{s.row.kv_type_v}" for s in stories if s.row.kv_type_k is not None})
    coarse = {kv_type for pair in recorded for kv_type in pair.split("/")} & (PACKED_TYPES | {"u8"})
    for target in done:
        kept = target.runs[0].kv_types
        if coarse and recorded != [kept]:
            yield f"{target.target.spec}: keeps keys/values as {kept}, recorded were {', '.join(recorded)}"
        rows, unclear = (sum(getattr(r, f"witness_{what}") for r in target.runs) for what in ("rows", "unclear"))
        if unclear:
            yield (
                f"{target.target.spec}: of {rows} rows read, {unclear} are stored as {kept} so coarsely that their key "
                "lies between two tokens'; they are not counted as identified, so this is not `equal`"
            )
