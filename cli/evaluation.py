"""What the tasks of `kvtape eval` share: what was asked, the engines, the world of the run, the envelope."""

from __future__ import annotations

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
from kvtape.cli.output import note, report_digest
from kvtape.cli.precision import as_asked, with_precision
from kvtape.cli.recording import recording, require_new, run_row
from kvtape.eval.targets import NullSink, Target, World
from kvtape.replay.targets import parse_target

__all__ = ["Asked", "check_common", "envelope", "opened_targets", "opened_world"]


@dataclass(frozen=True, slots=True)
class Asked:
    """The command's options."""

    task: str
    model: Path | None
    backends: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[int, ...]
    seeds: str
    layer_seeds: str | None
    choose_layers: bool
    tokens: int | None
    text: str | None
    format_name: str | None
    where: tuple[str, ...]
    n_ctx: int | None
    threads: int
    chunk: int
    log: Path | None
    content: bool
    timings: bool
    as_json: bool
    comparators: tuple[str, ...] = ()
    budget_blocks: tuple[int, ...] = ()
    new_tokens: int | None = None
    continued: str = "text"
    prove_options: bool = False
    kv_type: str | None = None
    flash: str | None = None
    uncertified: bool = False

    def config(self, **of_task: Any) -> dict[str, Any]:
        """What the run's digest is over: the options that every task has, and `of_task`."""
        return {
            "task": self.task,
            "backends": list(self.backends),
            "threads": self.threads,
            "chunk": self.chunk,
            **as_asked(self.kv_type, self.flash, uncertified=self.uncertified),
            **of_task,
        }


def check_common(asked: Asked) -> None:
    """What can be wrong with any task. Raises SpecError, UsageError, before anything is opened."""
    for backend in asked.backends:
        parse_target(backend)
    if len(set(asked.backends)) < len(asked.backends):
        raise UsageError("--backend: one of them is given twice")
    _refuse_what_the_task_does_not_read(asked)
    if asked.log is not None:
        require_new(asked.log)
    elif asked.content:
        raise UsageError("--content: nothing is stored without --log; name a log, or leave --content out")


def _refuse_what_the_task_does_not_read(asked: Asked) -> None:
    """An option that had no effect would look as if it had one."""
    read_by: dict[str, dict[str, Any]] = {
        "needle": {
            "--format": asked.format_name,
            "--needle-at": asked.where,
            "--choose-layers": asked.choose_layers,
            "--layer-seeds": asked.layer_seeds,
        },
        "batching": {
            "--comparator": asked.comparators,
            "--budget-blocks": asked.budget_blocks,
            "--new-tokens": asked.new_tokens,
            "--continue": asked.continued != "text",
            "--prove-options": asked.prove_options,
        },
    }
    others = {option: value for task, read in read_by.items() if task != asked.task for option, value in read.items()}
    if asked.task == "needle":
        others["--text"] = asked.text
    if asked.task == "batching":
        others |= {"--budget": asked.budgets, "--n-ctx": asked.n_ctx}
    for option, value in others.items():
        if value not in (None, False, ()):
            raise UsageError(f"{option}: --task {asked.task} does not read it; leave it out or take another task")


@contextmanager
def opened_targets(asked: Asked) -> Iterator[list[Target]]:
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
            config = with_precision(target.engine, config, asked.kv_type, asked.flash, uncertified=asked.uncertified)
            targets.append(Target(spec, engine, config, target.way))
        yield targets


@contextmanager
def opened_world(asked: Asked, config: dict[str, Any], targets: Sequence[Target]) -> Iterator[World]:
    """The world of the run; with a log, when one was asked for, sealed at the end, also when the block raises."""
    clock = MonotonicClock()
    row = run_row("live", config, {t.engine.name: t.engine.version for t in targets}, clock.now_ns(), prefix="eval")
    if asked.log is None:
        yield World(NullSink(), clock, row.run_id)
        return
    with recording(asked.log, row, clock) as recorder:
        yield World(recorder, clock, row.run_id, asked.content)
    note(f"kvtape: every trial is in {asked.log}")


def envelope(config: dict[str, Any], targets: Sequence[Target]) -> dict[str, Any]:
    """The part of a report that is the same for every task."""
    return {
        "task": config["task"],
        "model": config["model"],
        "engines": {t.spec: t.engine.version for t in targets},
        "config": config,
        "config_digest": report_digest(config),
        "seeds": config.get("seeds"),
    }
