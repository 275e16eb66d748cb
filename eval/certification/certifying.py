"""Certifying the knobs of one model on one engine, each in an engine of its own, one finished row after the other.

    the base precision: predictions, recall, the stream with shifts (what the others are compared with)
    each knob:          open -> capacity -> quality -> round trip -> snapshot -> shift

An ability that is refused or kills the engine is a measure that says so; the others are still taken.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Protocol

from kvtape.backends.proofs.knobs import knob_text
from kvtape.backends.proofs.machine import machine_class
from kvtape.backends.proofs.rows import Ability, Measure, ProofRow
from kvtape.backends.protocol import Clock, Engine, ModelFacts, SessionConfig
from kvtape.eval.certification.bench import Bench, attempt
from kvtape.eval.certification.catalog import BASES, Knob
from kvtape.eval.certification.drift import shift_measures, stream_rebased
from kvtape.eval.certification.quality import Predictions, measure_predictions, quality, recall
from kvtape.eval.certification.round_trip import range_round_trip, snapshot_round_trip
from kvtape.eval.certification.size import row_bytes
from kvtape.eval.certification.smoke import Smoke
from kvtape.eval.certification.verdicts import Outcome, outcome_of

__all__ = ["Certifier", "OpenEngine", "Progress"]

_DRIFT_OPTIONS: Final = {"llama": (("shift_quantised", "yes"),)}
"""What an engine must be told before it rotates keys that drift, which is what is to be measured."""


class OpenEngine(Protocol):
    """Loads a model: `backends.registry.open_engine`, or the same in a process of its own."""

    def __call__(self, name: str, model_path: Path, options: Mapping[str, str], /) -> Engine: ...


Progress = Callable[[str], None]
"""Called with what is being measured."""


@dataclass(frozen=True, slots=True)
class _Best:
    """What the base precision says; `drifted` None where it cannot be shifted."""

    predictions: Predictions
    recall: float
    drifted: Predictions | None


@dataclass(slots=True)
class Certifier:
    """`day`: UTC, as the rows bear it. `options`: of the engine, for every knob."""

    name: str
    model: Path
    open_engine: OpenEngine
    smoke: Smoke
    clock: Clock
    day: str
    options: Mapping[str, str] = field(default_factory=dict)
    progress: Progress = lambda what: None
    known: Callable[[str], ProofRow | None] = lambda subject: None
    """The row that an earlier run made of a subject, if there is one that may stand for a new one."""
    _best: _Best | None = None

    def certify(self, knob: Knob) -> list[ProofRow]:
        """The rows of one knob: one, or for `auto` that of what the engine takes and one that says so.

        Raises what loading the model raises, and whatever the base precision itself raises: without it there is
        nothing to compare with.
        """
        with closing(self._engine()) as engine:
            bench = self._bench(engine, knob)
            effective, opened = self._open(bench, knob)
            if effective is None:
                return [self._row(engine, knob.asked, opened)]
            known = self.known(effective) if effective != knob.asked else None
            rows = []
            if known is None:
                known = self._row(engine, effective, [*opened, *self._abilities(bench, self._measured(), effective)])
                rows.append(known)
            if effective != knob.asked:
                told = f"the engine takes {effective}, whose row decides"
                rows.append(self._row(engine, knob.asked, opened, Outcome(known.verdict, told)))
            return rows

    def _engine(self) -> Engine:
        return self.open_engine(self.name, self.model, self.options)

    def _bench(self, engine: Engine, knob: Knob) -> Bench:
        base = SessionConfig(chunk=self.smoke.sizes.chunk, options=dict(self.options))
        return Bench(engine, knob.config(base), self.smoke, self.clock)

    def _measured(self) -> _Best:
        if self._best is None:
            knob = BASES[self.name]
            with closing(self._engine()) as engine:
                bench = self._bench(engine, knob)
                self.progress(f"{knob.asked} (what the others are compared with)")
                predictions, found = measure_predictions(bench), recall(bench)
                drifted: list[Predictions] = []

                def stream() -> list[Measure]:
                    drifted.append(stream_rebased(bench, self._drift_options())[0])
                    return []

                attempt("shift", "kl", stream)
                self._best = _Best(predictions, found, drifted[0] if drifted else None)
        return self._best

    def _drift_options(self) -> Sequence[tuple[str, str]]:
        return _DRIFT_OPTIONS.get(self.name, ())

    def _open(self, bench: Bench, knob: Knob) -> tuple[str | None, list[Measure]]:
        """What the engine made of the knob, as text; None where it does not open."""
        found: list[str] = []

        def look() -> list[Measure]:
            backend = bench.engine.open(replace(bench.config, n_ctx=bench.smoke.sizes.range_tokens))
            with closing(backend):
                found.append(knob_text(backend.name, backend.config))
            return [Measure(ability="open", name="opens", verdict="pass")]

        self.progress(f"{knob.asked}: open")
        measures = attempt("open", "opens", look)
        return (found[0] if found else None), measures

    def _abilities(self, bench: Bench, best: _Best, subject: str) -> list[Measure]:
        def predicted() -> list[Measure]:
            return quality(
                best.predictions,
                measure_predictions(bench),
                best.recall,
                recall(bench),
                self.smoke.sizes.needles,
            )

        def drifted() -> list[Measure]:
            other, shifts = stream_rebased(bench, self._drift_options())
            if best.drifted is None:
                return [
                    Measure(ability="shift", name="kl", verdict="refused", reason="the base precision cannot shift")
                ]
            return shift_measures(best.drifted, other, shifts)

        steps: tuple[tuple[Ability, str, Callable[[], list[Measure]]], ...] = (
            ("capacity", "row_bytes_delta", lambda: row_bytes(bench)),
            ("quality", "kl", predicted),
            ("round_trip", "changed_bytes", lambda: range_round_trip(bench)),
            ("snapshot", "kl", lambda: snapshot_round_trip(bench)),
            ("shift", "kl", drifted),
        )
        measures: list[Measure] = []
        for ability, name, measure in steps:
            self.progress(f"{subject}: {ability.replace('_', ' ')}")
            measures += attempt(ability, name, measure)
        return measures

    def _row(
        self, engine: Engine, subject: str, measures: Sequence[Measure], outcome: Outcome | None = None
    ) -> ProofRow:
        facts: ModelFacts = engine.facts
        result = outcome or outcome_of(measures)
        return ProofRow(
            kind="certification",
            model=Path(facts.path).name,
            fingerprint=facts.fingerprint,
            engine=engine.name,
            engine_version=engine.version,
            machine=machine_class(),
            day=self.day,
            subject=subject,
            settings=self.smoke.settings,
            verdict=result.verdict,
            reason=result.reason,
            measures=tuple(measures),
        )
