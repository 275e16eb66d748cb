"""What `kvtape gate` does: cells measured one after the other, each kept as it is finished, told at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvtape.backends.clock import MonotonicClock, WallClock, utc_day
from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.proofs.machine import speed_class
from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import add_rows, proofs_path
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.cli.models import demo_model
from kvtape.cli.output import Section, emit, note
from kvtape.cli.precision import as_asked, with_precision
from kvtape.cli.progress import progress
from kvtape.cli.prompts import read_chat
from kvtape.cli.proof_log import proof_writer
from kvtape.cli.recording import recording, require_new, run_row
from kvtape.eval.gate.arms import Meter, ProcessClock
from kvtape.eval.gate.cells import Cell
from kvtape.eval.gate.effect import INTERVAL, LEAST_CONVERSATIONS
from kvtape.eval.gate.lent import LentEngines
from kvtape.eval.gate.optimisations import optimisation_named
from kvtape.eval.gate.proof import gate_proof, refused_proof
from kvtape.eval.gate.report import COLUMNS, body_of, cells_of
from kvtape.eval.gate.run import Effort, context_for, refusal, run_cell
from kvtape.eval.gate.workloads import Workload, own_chat, workload_named
from kvtape.eval.targets import NullSink, Target, World
from kvtape.replay.targets import Target as EngineTarget
from kvtape.replay.targets import parse_target

__all__ = ["DEFAULT_CELLS", "Asked", "run_gate"]

DEFAULT_CELLS = ("deferred-prefill", "lookup")


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's options. `cells`: none given are `DEFAULT_CELLS`, as far as they open."""

    backend: str
    model: Path | None
    cells: tuple[str, ...]
    workloads: tuple[str, ...]
    chat: str | None
    decode: int
    effort: Effort
    threads: int
    chunk: int
    kv_type: str | None
    flash: str | None
    uncertified: bool
    log: Path | None
    content: bool
    out: Path | None
    as_json: bool

    @property
    def document(self) -> Path:
        """Where rows are kept."""
        return self.out if self.out is not None else proofs_path()


def run_gate(asked: Asked) -> int:
    """Exit 0, 1 where an optimised session says or computes something else than the plain one.

    Raises UsageError for what cannot be asked, before a model is loaded.
    """
    target = parse_target(asked.backend)
    if target.way != "native":
        raise UsageError("--backend: the gate never evicts, so there is no way to choose; leave way= out")
    if asked.log is not None:
        require_new(asked.log)
    elif asked.content:
        raise UsageError("--content: nothing is stored without --log; name a log, or leave --content out")
    with LentEngines() as drafts:
        return _run(asked, target, _cells(asked, drafts))


def _run(asked: Asked, target: EngineTarget, asked_cells: list[Cell]) -> int:
    model = asked.model if asked.model is not None else demo_model()
    clock = MonotonicClock()
    rows: list[ProofRow] = []
    with closing(open_engine(target.engine, model, target.options)) as engine:
        plain = SessionConfig(chunk=asked.chunk, threads=target.threads or asked.threads, options=dict(target.options))
        config = with_precision(target.engine, plain, asked.kv_type, asked.flash, uncertified=asked.uncertified)
        if not asked.cells:
            asked_cells = _openable(asked_cells, Target(asked.backend, engine, config), asked.effort, clock)
        of_run = _config(asked, engine, config, asked_cells)
        with _world(asked, of_run, engine, clock) as (world, keep), progress("asking the gate") as shown:
            for number, cell in enumerate(asked_cells):
                what = f"{cell.optimisation.name} on {cell.workload.name}"
                shown.update(number, len(asked_cells), what)
                rows.append(_row(cell, Target(asked.backend, engine, config), world, asked.effort, f"{number}-"))
                keep(rows[-1])
    body: dict[str, Any] = {
        "engine": engine.name,
        "engine_version": engine.version,
        "machine": speed_class(),
        "margin": asked.effort.margin,
        "rules": {"interval": INTERVAL, "order": "ABBA or BAAB, drawn from the seed"},
        "config": of_run,
        "kept": str(asked.document),
        "rows": [body_of(row) for row in rows],
    }
    title = f"the gate; * decides, with at least {100 * asked.effort.margin:g} % in the whole 95 % interval"
    emit("gate", body, [Section(title, COLUMNS, cells_of(rows))], as_json=asked.as_json)
    return 1 if any(row.ability("quality") == "fail" for row in rows) else 0


def _cells(asked: Asked, drafts: LentEngines) -> list[Cell]:
    """Every optimisation on every workload. Raises UsageError."""
    workloads: list[Workload] = [workload_named(name) for name in asked.workloads]
    if asked.chat is not None:
        said = [(m.role, m.content) for m in read_chat(asked.chat)]
        workloads.append(own_chat(said, asked.decode))
    optimisations = [optimisation_named(text, drafts.open) for text in asked.cells or DEFAULT_CELLS]
    cells = [Cell(o, w) for o in optimisations for w in workloads]
    if len({(c.optimisation.name, c.workload.name) for c in cells}) < len(cells):
        raise UsageError("--cell, --workload: one of them is given twice")
    if not cells:
        raise UsageError("nothing to ask: give --cell and --workload")
    return cells


def _openable(cells: list[Cell], target: Target, effort: Effort, clock: MonotonicClock) -> list[Cell]:
    """Those that nobody named and that open here. Each optimisation that does not is told in a line, with its reason.

    Raises UsageError where none is left.
    """
    refused: dict[str, str | None] = {}
    for cell in cells:
        name = cell.optimisation.name
        if name not in refused:
            refused[name] = refusal(cell, target, effort, clock)
            if refused[name] is not None:
                short = name.partition(":")[0]
                note(f"kvtape: {short} is left out: {refused[name]}; --cell {short} keeps the refusal as a row")
    left = [cell for cell in cells if refused[cell.optimisation.name] is None]
    if not left:
        raise UsageError("no optimisation that is asked by default opens here; name one with --cell")
    return left


def _row(cell: Cell, target: Target, world: World, effort: Effort, prefix: str) -> ProofRow:
    engine, day = target.engine, utc_day(WallClock())
    n_ctx = context_for(cell.workload, effort, engine.tokenize)
    with closing(engine.open(replace(target.config, n_ctx=n_ctx))) as opened:
        config = opened.config
    settings = (
        f"seed={effort.seed} turns={effort.conversations(cell.workload)}x{cell.workload.turns} "
        f"n_ctx={n_ctx} chunk={config.chunk} margin={effort.margin:g}"
    )
    meter = Meter(MonotonicClock(), ProcessClock(), config.threads)
    try:
        outcome = run_cell(cell, target, world, meter, effort, prefix=prefix)
    except UnsupportedOperation as err:
        return refused_proof(cell, engine, config, str(err), day=day, settings=settings)
    return gate_proof(cell, engine, config, outcome, day=day, settings=settings)


def _config(asked: Asked, engine: Engine, config: SessionConfig, cells: list[Cell]) -> dict[str, Any]:
    return {
        "verb": "gate",
        "backend": asked.backend,
        "cells": [f"{c.optimisation.name}@{c.workload.name}" for c in cells],
        "turns": asked.effort.turns,
        "least_conversations": LEAST_CONVERSATIONS,
        "seed": asked.effort.seed,
        "margin": asked.effort.margin,
        "threads": config.threads,
        "chunk": config.chunk,
        **as_asked(asked.kv_type, asked.flash, uncertified=asked.uncertified),
        "model": engine.facts.fingerprint,
    }


@contextmanager
def _world(
    asked: Asked, of_run: dict[str, Any], engine: Engine, clock: MonotonicClock
) -> Iterator[tuple[World, Callable[[ProofRow], None]]]:
    """The world of the run, and what is called with each row as it is finished: into the document, and into the log."""

    def keep(row: ProofRow) -> None:
        add_rows([row], asked.document)
        note(f"kvtape: {row.subject}: {row.verdict} ({row.reason})")

    run = run_row("live", of_run, {engine.name: engine.version}, clock.now_ns(), prefix="gate")
    if asked.log is None:
        yield World(NullSink(), clock, run.run_id), keep
        return
    with recording(asked.log, run, clock) as recorder:
        write = proof_writer(recorder)

        def keep_in_log(row: ProofRow) -> None:
            keep(row)
            write(row)

        yield World(recorder, clock, run.run_id, asked.content), keep_in_log
