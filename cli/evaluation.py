"""What `kvtape eval` does: checks everything that can be wrong, opens engines and log, runs the task, prints rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtape.backends.clock import MonotonicClock
from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.cli.models import demo_model
from kvtape.cli.output import Section, canonical_json, emit, kvtape_version, note
from kvtape.cli.progress import progress
from kvtape.cli.recording import recording, require_new
from kvtape.eval.candidates import Candidate, candidates_of
from kvtape.eval.intervals import WILSON
from kvtape.eval.needle import NeedleTask, prepare, run_needle
from kvtape.eval.needle_report import needle_rows
from kvtape.eval.needles import FORMATS
from kvtape.eval.places import REGIONS, regions_of
from kvtape.eval.ranges import parse_range
from kvtape.eval.targets import NullSink, Target, World
from kvtape.planner.grammar import choose_name
from kvtape.planner.rows import RunRow
from kvtape.replay.targets import parse_target

__all__ = ["Asked", "run"]

TASKS = ("needle", "nll")


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's options."""

    task: str
    model: Path | None
    backends: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    seeds: str
    tokens: int | None
    format_name: str
    where: tuple[str, ...]
    n_ctx: int | None
    threads: int
    chunk: int
    log: Path | None
    content: bool
    timings: bool
    as_json: bool


def run(asked: Asked) -> int:
    """Exit 0. Raises UsageError and SpecError for what cannot be run, before a log exists."""
    choose_name("task", asked.task, TASKS)
    for backend in asked.backends:
        parse_target(backend)
    if len(set(asked.backends)) < len(asked.backends):
        raise UsageError("--backend: one of them is given twice")
    candidates = candidates_of(asked.policies, asked.budgets)
    if asked.log is not None:
        require_new(asked.log)
    return _needle(asked, candidates)


def _needle(asked: Asked, candidates: list[Candidate]) -> int:
    choose_name("format", asked.format_name, FORMATS)
    for region in asked.where:
        choose_name("region", region, REGIONS)
    seeds = parse_range("--seeds", asked.seeds)
    spans = [(c.policy.sink, c.policy.recent) for c in candidates if c.policy.name == "stream"]
    regions = regions_of(
        spans or [(c.policy.sink, c.budget - c.policy.sink) for c in candidates if c.budget] or [(0, 1)]
    )
    task = NeedleTask(
        format_name=asked.format_name,
        seeds=tuple(seeds),
        where=tuple(dict.fromkeys(asked.where)),
        regions=regions,
        n_tokens=asked.tokens or 1000,
        n_ctx=asked.n_ctx,
    )
    config: dict[str, Any] = {
        "task": "needle",
        "backends": list(asked.backends),
        "policies": [{"policy": c.label, "budget": c.budget} for c in candidates],
        "seeds": f"{seeds.start}:{seeds.stop}",
        "format": task.format_name,
        "needle_at": list(task.where),
        "tokens": task.n_tokens,
        "n_ctx": task.n_ctx,
        "threads": asked.threads,
        "chunk": asked.chunk,
    }
    with _targets(asked) as targets:
        config["model"] = targets[0].engine.facts.fingerprint
        prompts = prepare(task, targets, candidates)
        with _world(asked, config, targets) as world, progress("evaluating") as shown:
            trials = run_needle(task, targets, prompts, candidates, world, shown.update)
    rows = needle_rows(trials)
    body = _body(config) | {
        "rules": {
            "interval": WILSON,
            "order": "prefill, score, evict, then the question",
            "budget": "tokens kept of the context; question and answer come on top",
            "correct": "the greedy answer begins with the expected word",
            "regions": regions.text(),
        },
        "rows": rows,
    }
    if asked.timings:
        for row in rows:
            took = [t.elapsed_ns for t in trials if _same(t, row)]
            note(f"{row['backend']}\t{row['region']}\t{row['policy']}\t{sum(took) / len(took) / 1e9:.2f} s a trial")
    columns = ("backend", "region", "policy", "budget", "recall", "low", "high", "n", "kept", "needle kept", "scored")
    keys = ("backend", "region", "policy", "budget", "recall", "recall_low", "recall_high", "n", "kept", "needle_kept")
    table = [
        (*(round(row[k], 3) if isinstance(row[k], float) else row[k] for k in keys), _yes_no(row["scored"]))
        for row in rows
    ]
    emit("eval", body, [Section(f"recall, {WILSON} interval", columns, table)], as_json=asked.as_json)
    return 0


def _same(trial: Any, row: dict[str, Any]) -> bool:
    return (trial.backend, trial.region, trial.candidate.label, trial.candidate.budget) == (
        row["backend"],
        row["region"],
        row["policy"],
        row["budget"],
    )


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no, as stream", None: ""}[value]


def _body(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "task": config["task"],
        "config": config,
        "config_digest": _digest(config),
        **({"seeds": config["seeds"]} if "seeds" in config else {}),
    }


def _digest(config: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


@contextmanager
def _targets(asked: Asked) -> Iterator[list[Target]]:
    """The engines, loaded; closed at the end."""
    model = asked.model if asked.model is not None else demo_model()
    with ExitStack() as stack:
        targets = []
        for spec in asked.backends:
            target = parse_target(spec)
            engine = open_engine(target.engine, model, target.options)
            stack.callback(engine.close)
            config = SessionConfig(
                chunk=asked.chunk, threads=target.threads or asked.threads, options=dict(target.options)
            )
            targets.append(Target(spec, engine, config, target.way))
        yield targets


@contextmanager
def _world(asked: Asked, config: dict[str, Any], targets: Sequence[Target]) -> Iterator[World]:
    """The world of the run; with a log, when one was asked for, sealed at the end, also when the block raises."""
    clock = MonotonicClock()
    digest = _digest(config)
    run_id = f"eval-{digest[:12]}"
    if asked.log is None:
        yield World(NullSink(), clock, run_id)
        return
    row = RunRow(
        run_id=run_id,
        kind="live",
        config_digest=digest,
        config=canonical_json(config),
        seed=None,
        kvtape_version=kvtape_version(),
        engine_versions=json.dumps({t.engine.name: t.engine.version for t in targets}, sort_keys=True),
        started_at_ns=clock.now_ns(),
    )
    with recording(asked.log, row, clock) as recorder:
        yield World(recorder, clock, run_id, asked.content)
    note(f"kvtape: every trial is in {asked.log}")
