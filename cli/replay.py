"""`kvtape replay`: carry a log out again on real engines, and ask each engine's memory whether it agrees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, LogPath, ModelPath
from kvtape.cli.isolation import Deadline, Isolate

if TYPE_CHECKING:
    from pathlib import Path

    from kvtape.cli.isolation import OpenEngine
    from kvtape.cli.output import Section
    from kvtape.replay.report import ReplayReport
    from kvtape.traces.reader import Log

__all__ = ["replay", "replay_log", "replay_sections"]

_MEASURES = {
    "way": "way",
    "events_compared": "events compared",
    "residency_events": "events that change residency",
    "witness_positions": "of these, positions witnessed",
    "witness_identities": "rows identified by their token",
    "residency_equal": "positions, rows and books agree",
    "not_executed": "refused or fatal, not executed",
    "checkpoints": "places where logits are compared",
    "mean_kl": "mean KL to the reference",
    "max_kl": "max KL to the reference",
    "top1": "top-1 agreement",
    "worst_session_mean_kl": "mean KL of the worst session",
    "worst_session_top1": "top-1 agreement of the worst session",
}
"""What the equality table shows of each backend."""


def replay(
    log: LogPath,
    on: Annotated[
        list[str],
        typer.Option(
            "--on", metavar="SPEC", help="llama, openvino or reference[:key=value,...]; repeatable.", show_default=False
        ),
    ],
    model: ModelPath = None,
    isolate: Isolate = False,
    deadline: Deadline = None,
    as_json: AsJson = False,
) -> int:
    """Carry a log out again and compare what each engine holds.

    After every event that changes what is resident, each engine's own memory is read and judged. Exits 1 at a
    divergence.

    \b
    Example:
      kvtape replay demo-out/demo.duckdb --on llama --on openvino:way=recompute
    """
    from kvtape.cli.isolation import engine_opener
    from kvtape.cli.logs import opened
    from kvtape.cli.output import emit

    open_engine = engine_opener(isolate=isolate, deadline=deadline)
    with opened(log) as tape:
        report = replay_log(tape, on, model, open_engine)
    body = report.to_json()
    emit("replay", body, replay_sections(body), as_json=as_json)
    return 0 if body["equal"] else 1


def replay_log(tape: Log, on: list[str], model: Path | None, open_engine: OpenEngine | None = None) -> ReplayReport:
    """Replay the log's default run, with progress on stderr. Raises UsageError when the model is not to be found."""
    from kvtape.backends.registry import open_engine as in_process
    from kvtape.backends.registry import require_engine
    from kvtape.cli.models import model_for_log
    from kvtape.cli.progress import progress
    from kvtape.replay.replayer import replay as run
    from kvtape.replay.targets import parse_target

    for spec in on:  # before a model is asked for that may not be needed
        require_engine(parse_target(spec).engine)
    rows = tape.sessions(tape.default_run().run_id)
    path = model_for_log(model, rows[0].model_fingerprint, rows[0].model_name) if rows else model
    with progress("replaying") as shown:
        return run(
            tape,
            on,
            model_path=path,
            open_engine=open_engine or in_process,
            progress=lambda session, seq, total: shown.update(seq, total, session),
        )


def replay_sections(body: dict[str, Any]) -> list[Section]:
    """The equality table, and where there is one the first divergence with the events before it."""
    from kvtape.cli.output import Section

    backends = body["backends"]
    rows = [(name, *(b[key] for b in backends)) for key, name in _MEASURES.items()]
    rows = [row for row in rows if any(value is not None for value in row[1:])]  # what was not measured has no row
    verdict = "EQUAL: the same tokens are resident everywhere" if body["equal"] else "NOT EQUAL"
    sections = [Section(verdict, ("", *(b["name"] for b in backends)), rows)]
    sections += [Section(text, (), ()) for text in _remarks(body)]
    first = body["first_divergence"]
    if first is not None:
        facts = [(key, value) for key, value in first.items() if key != "context"]
        sections.append(Section("first divergence", ("what", "value"), facts))
        context = first.get("context") or []
        if context:
            names = tuple(context[0])
            sections.append(Section("events around it", names, [tuple(e[n] for n in names) for e in context]))
    return sections


def _remarks(body: dict[str, Any]) -> list[str]:
    gate = body["tolerances"]
    numbers = (
        f"the gate of each session is mean KL <= {gate['mean_kl']:g} and top-1 >= {gate['top1']:g} against each way's "
        f"own reference; "
        f"two correct runs of a quantised model differ by a mean KL of about {gate['noise_floor_mean_kl']:g}"
    )
    return [numbers, *body["notes"]]
