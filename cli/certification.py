"""What `kvtape certify` does: rows measured or found, kept as they are finished, told at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtape.backends.clock import MonotonicClock, WallClock, utc_day
from kvtape.backends.errors import UsageError
from kvtape.backends.isolated.engine import open_isolated
from kvtape.backends.proofs.machine import machine_class
from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import add_rows, open_proofs, proofs_path, read_rows, shipped_rows
from kvtape.cli.engine_text import essay
from kvtape.cli.models import demo_model
from kvtape.cli.output import Section, emit, note
from kvtape.cli.progress import progress
from kvtape.cli.prompts import read_text
from kvtape.cli.proof_log import proof_writer
from kvtape.cli.recording import recording, require_new, run_row
from kvtape.eval.certification.catalog import Knob, chosen_knobs
from kvtape.eval.certification.certifying import Certifier
from kvtape.eval.certification.report import rows_body, table
from kvtape.eval.certification.smoke import FULL, QUICK, smoke_of
from kvtape.eval.certification.thresholds import judged_today
from kvtape.replay.targets import Target, parse_target

__all__ = ["Asked", "run_certify"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's options."""

    backend: str
    model: Path | None
    kv_types: tuple[str, ...]
    flash: tuple[str, ...]
    text: str | None
    log: Path | None
    out: Path | None
    quick: bool
    again: bool
    as_json: bool

    @property
    def document(self) -> Path:
        """Where rows are kept and looked for."""
        return self.out if self.out is not None else proofs_path()


def run_certify(asked: Asked) -> int:
    """Exit 0, 1 where a type fails. Raises UsageError for what cannot be asked, before a model is loaded."""
    if asked.quick and asked.out is not None:
        raise UsageError("--quick keeps nothing, --out says where to keep it; give one of them")
    target = parse_target(asked.backend)
    knobs = chosen_knobs(target.engine, asked.kv_types, asked.flash, target.options.get("inference"))
    if asked.log is not None:
        require_new(asked.log)
    kept = () if asked.quick else _kept(asked)
    certifier, version, fingerprint = _certifier(asked, target)
    config: dict[str, Any] = {"verb": "certify", "backend": asked.backend, "settings": certifier.smoke.settings}
    config |= {"knobs": [knob.asked for knob in knobs], "model": fingerprint}
    found: dict[str, ProofRow] = {}
    if not asked.again:
        found |= {row.subject: row for row in kept if _stands(row, certifier, version, fingerprint)}
    rows: list[ProofRow] = []
    with _keeper(asked, config, version) as keep, progress("certifying") as shown:
        certifier.known = found.get
        certifier.progress = lambda what: shown.update(len(rows), len(knobs), what)
        note(_begins(target.engine, certifier, knobs, found))
        for knob in knobs:
            if knob.asked not in found:
                note(f"kvtape: {knob.asked}: measuring")
            for row in _rows(knob, certifier, found):
                new = found.get(row.subject) is not row
                found[row.subject] = row
                rows.append(row)
                keep(row, new)
    body = {
        "engine": target.engine,
        "engine_version": version,
        "machine": machine_class(),
        "settings": certifier.smoke.settings,
        "kept": None if asked.quick else str(asked.document),
        "rows": rows_body(rows),
    }
    emit("certify", body, [Section(*table(rows))], as_json=asked.as_json)
    return 1 if any(row.verdict == "fail" for row in rows) else 0


def _kept(asked: Asked) -> tuple[ProofRow, ...]:
    """Rows that may stand for a measurement, the later of two on one thing: shipped ones too, but not in the place of
    rows that a document of its own is to have."""
    if asked.out is None:
        return open_proofs(asked.document).rows
    return read_rows(asked.document) if asked.document.exists() else ()


def _begins(engine: str, certifier: Certifier, knobs: Sequence[Knob], found: Mapping[str, ProofRow]) -> str:
    """The line before the first measurement, which may take minutes."""
    there = sum(knob.asked in found for knob in knobs)
    what = f"kvtape: certifying {len(knobs)} settings of {certifier.model.name} on {engine}"
    return what if not there else f"{what}; {there} have a row already, which --again measures anew"


def _rows(knob: Knob, certifier: Certifier, found: dict[str, ProofRow]) -> list[ProofRow]:
    there = found.get(knob.asked)
    return certifier.certify(knob) if there is None else [there]


def _stands(row: ProofRow, certifier: Certifier, version: str, fingerprint: str) -> bool:
    """Whether a kept row says what a new one would: measured the same way, held to the thresholds of today."""
    here = ("certification", fingerprint, certifier.name, version, machine_class(), row.subject)
    same = row.place == here and row.settings == certifier.smoke.settings
    return same and all(measure == judged_today(measure) for measure in row.measures)


def _certifier(asked: Asked, target: Target) -> tuple[Certifier, str, str]:
    """The certifier, the engine's version and the model's fingerprint.

    The text is cut into tokens by the model's own vocabulary.
    """
    model = asked.model if asked.model is not None else demo_model()
    text = essay() if asked.text is None else read_text(asked.text)
    options = {key: value for key, value in target.options.items() if key != "inference"}
    with closing(open_isolated(target.engine, model, options)) as engine:
        facts = engine.facts
        smoke = smoke_of(engine.tokenize(text), QUICK if asked.quick else FULL, facts.n_ctx_train)
        version = engine.version
    certifier = Certifier(
        name=target.engine,
        model=model,
        open_engine=open_isolated,
        smoke=smoke,
        clock=MonotonicClock(),
        day=utc_day(WallClock()),
        options=options,
    )
    return certifier, version, facts.fingerprint


def _source(row: ProofRow) -> str:
    return f"as on {row.day}" + (", by a row that comes with kvtape" if row in shipped_rows() else "")


@contextmanager
def _keeper(asked: Asked, config: dict[str, Any], version: str) -> Iterator[Callable[[ProofRow, bool], None]]:
    """Called with each row and whether it is new, as it is finished: into the document, and into the log."""
    engine = str(config["backend"]).partition(":")[0]

    def keep(row: ProofRow, new: bool) -> None:
        if new and not asked.quick:
            add_rows([row], asked.document)
        note(f"kvtape: {row.subject}: {row.verdict}" + ("" if new else f", {_source(row)}"))

    if asked.log is None:
        yield keep
        return
    clock = MonotonicClock()
    run = run_row("live", config, {engine: version}, clock.now_ns(), prefix="certify")
    with recording(asked.log, run, clock) as recorder:
        write = proof_writer(recorder)

        def keep_in_log(row: ProofRow, new: bool) -> None:
            keep(row, new)
            write(row)

        yield keep_in_log
