"""`kvtape demo`: the whole tool on a real model in a few minutes, or what needs no engine in a few seconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AnyModelPath, AsJson
from kvtape.cli.precision import KvType

if TYPE_CHECKING:
    from kvtape.cli.demo_results import DemoResults
    from kvtape.cli.output import Section

__all__ = ["REPLAY_ON", "demo"]

REPLAY_ON = ("llama", "openvino", "openvino:way=recompute")


def demo(
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where everything is written.")] = Path("demo-out"),
    modelled: Annotated[
        bool, typer.Option("--modelled", help="On a bundled log, without an engine: seconds, not minutes.")
    ] = False,
    model: AnyModelPath = None,
    threads: Annotated[
        int | None, typer.Option("--threads", metavar="N", min=1, help="Engine threads.  [default: 2]")
    ] = None,
    kv_type: KvType = None,
    as_json: AsJson = False,
) -> int:
    """Record a session, replay it on both engines, ask it, try other policies, write a report.

    Writes the log with its head and key, replay.json, answers.json, costs.json, whatif.json, curve.json, map.svg and
    report.html to DIR; an earlier demo there is replaced. With --modelled nothing is recorded or replayed: the log is
    one that came with kvtape. Exits 1 when the engines, or the simulation and the record, disagree.
    """
    from kvtape.backends.errors import UsageError

    if not modelled:
        return _recorded(out, model, threads or 2, kv_type, as_json=as_json)
    if model is not None or threads is not None or kv_type is not None:
        raise UsageError(
            "--modelled runs no engine; leave out --model, --threads and --kv-type, or leave out --modelled"
        )
    return _modelled(out, as_json=as_json)


def _recorded(out: Path, model: Path | None, threads: int, kv_type: str | None, *, as_json: bool) -> int:
    from kvtape.backends.errors import EnvironmentProblem
    from kvtape.cli.demo_record import record_demo
    from kvtape.cli.demo_results import demo_results, fresh, write_result
    from kvtape.cli.logs import opened
    from kvtape.cli.models import demo_model, trained_context
    from kvtape.cli.output import Section, note
    from kvtape.cli.replay import replay_log, replay_sections

    try:
        path = model if model is not None else demo_model()
        _require_engines()
    except EnvironmentProblem as missing:
        raise EnvironmentProblem(f"{missing}, or see it without an engine: kvtape demo --modelled") from None
    log = fresh(out)
    note(f"1/4 recording two sessions of {path.name} on llama.cpp into {log}")
    answer = record_demo(log, path, threads, kv_type)
    with opened(log) as tape:
        note(f"2/4 replaying on {', '.join(REPLAY_ON)}, and asking each engine's memory what it holds")
        replay = replay_log(tape, list(REPLAY_ON), path).to_json()
        write_result(out, "replay", replay, tape.logical_digest())
        note("3/4 asking the log, learning from it what operations cost, simulating other policies and budgets")
        results = demo_results(tape, out, trained_context(path))
        note("4/4 drawing what was resident, and writing the report")
        results.draw(tape)
    said = Section(f"the model, asked what the witness is: {_first_line(answer)}", (), ())
    body = {"answer": answer, "replay": replay, "modelled": False}
    return _end(results, body, [*replay_sections(replay), *results.sections(), said], as_json=as_json) or (
        0 if replay["equal"] else 1
    )


def _modelled(out: Path, *, as_json: bool) -> int:
    from kvtape.cli.demo_results import demo_results, fresh
    from kvtape.cli.logs import opened
    from kvtape.cli.output import Section, note
    from kvtape.cli.sample.bundled import sample_facts, unpack_sample

    facts, log = sample_facts(), fresh(out)
    note(f"1/3 unpacking what kvtape demo once recorded of {facts.model} on llama.cpp into {log}")
    unpack_sample(log)
    with opened(log) as tape:
        note("2/3 asking the log, learning from it what operations cost, simulating other policies and budgets")
        results = demo_results(tape, out, facts.trained_context)
        note("3/3 drawing what was resident, and writing the report")
        results.draw(tape)
    modelled = Section(
        "Recorded: the log, its times, and what was resident. Modelled: every time of a what-if, from costs learnt "
        "from the recorded ones. No engine ran here; with engines (pip install 'kvtape[demo]') kvtape demo records a "
        "log of its own and replays it.",
        (),
        (),
    )
    return _end(results, {"answer": facts.answer, "modelled": True}, [*results.sections(), modelled], as_json=as_json)


def _end(results: DemoResults, body: dict[str, Any], sections: list[Section], *, as_json: bool) -> int:
    from kvtape.cli.output import emit

    emit(
        "demo",
        body | results.body(),
        [*sections, *results.closing()],
        as_json=as_json,
        digest=results.digest,
        digest_kind="logical",
    )
    return 0 if results.whatif["recorded"]["equal"] else 1


def _require_engines() -> None:
    """Raises EnvironmentProblem before anything is recorded when an engine of the replay is not installed."""
    from importlib.util import find_spec

    from kvtape.backends.errors import EnvironmentProblem
    from kvtape.cli.doctor import ENGINES
    from kvtape.cli.errors import missing_extra

    for module, _ in ENGINES.values():
        if find_spec(module) is None:
            raise EnvironmentProblem(missing_extra(module))


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
