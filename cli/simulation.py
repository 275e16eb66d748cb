"""What the commands that simulate share: their options, the log as a workload, the model's trained context."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from kvtape.cli.output import Section
    from kvtape.sim.whatif.executors import Executor
    from kvtape.sim.whatif.rows import Draws
    from kvtape.sim.world.script import Script
    from kvtape.sim.world.settings import Settings

__all__ = [
    "Affinity",
    "ArrivalsOption",
    "CostsPath",
    "LinkBandwidth",
    "LinkLatency",
    "Memory",
    "Pace",
    "RayAddress",
    "Seed",
    "Seeds",
    "SlotDies",
    "TrainedContext",
    "Workers",
    "draws_of",
    "executor_of",
    "figure_rows",
    "machine",
    "rule_sections",
    "workload",
]

CostsPath = Annotated[
    Path, typer.Option("--costs", metavar="F.json", help="Costs, from kvtape calibrate.", show_default=False)
]
Memory = Annotated[
    str | None, typer.Option("--memory", metavar="SIZE", help="KV memory that all contexts share; default: enough.")
]
LinkBandwidth = Annotated[
    str | None,
    typer.Option(
        "--link", metavar="SIZE", help="Bytes a second to the cold store, shared by all; default: as calibrated."
    ),
]
LinkLatency = Annotated[
    float, typer.Option("--link-latency", metavar="MS", min=0.0, help="Latency of each transfer over --link.")
]
ArrivalsOption = Annotated[
    str, typer.Option("--arrivals", metavar="open|closed", help="Keep recorded times, or recorded think times.")
]
Pace = Annotated[float, typer.Option("--pace", metavar="X", help="So many times as fast as recorded.")]
Affinity = Annotated[
    bool,
    typer.Option("--affinity/--no-affinity", help="Whether a conversation finds its cache again in its next turn."),
]
TrainedContext = Annotated[
    int | None,
    typer.Option(
        "--n-ctx-train",
        metavar="N",
        min=2,
        help="The model's trained context; default: the model's, where it is found.",
    ),
]
SlotDies = Annotated[
    list[str] | None,
    typer.Option(
        "--slot-dies",
        metavar="AT_S[:SLOT]",
        help="So many seconds in, a slot fails for good; default: the lowest. Repeatable.",
    ),
]
Seeds = Annotated[
    int | None,
    typer.Option(
        "--seeds", metavar="N", min=1, help="Draw arrivals anew N times, for intervals. Default: as recorded."
    ),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="S", min=0, max=2**63 - 1, help="Of what is drawn; default: 0.")
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="Simulations at once; the result is the same for any number. Default: 1, with --ray as many as it can.",
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Simulate on a Ray cluster: local (starts one), auto, HOST:PORT or ray://HOST:PORT (extra ray).",
    ),
]


def draws_of(seeds: int | None, seed: int | None) -> Draws:
    """How arrivals are drawn. Raises UsageError for a seed of nothing."""
    from kvtape.backends.errors import UsageError
    from kvtape.sim.whatif.rows import Draws

    if seed is not None and (seeds or 1) == 1:
        raise UsageError("--seed is of the arrivals that --seeds draws; give --seeds 2 or more")
    return Draws(seeds or 1, seed or 0)


def executor_of(workers: int | None, ray: str | None) -> Executor:
    """Where simulations run. Raises SimulationError for an address that is none."""
    from kvtape.sim.whatif.executors import Serial
    from kvtape.sim.whatif.processes import Processes
    from kvtape.sim.whatif.ray_cluster import RayCluster

    if ray is not None:
        return RayCluster(ray, workers)
    return Serial() if workers in (None, 1) else Processes(workers)


def machine(
    *,
    memory: str | None,
    link: str | None,
    link_latency: float,
    arrivals: str,
    pace: float,
    affinity: bool,
    slot_dies: Sequence[str] | None,
    **varied: Any,
) -> Settings:
    """The settings that the shared options give, and `varied` fields as they are. Raises SimulationError."""
    from kvtape.sim.world.failures import parse_slot_failure
    from kvtape.sim.world.settings import Settings

    return Settings(
        **varied,
        memory_bytes=_byte_count("--memory", memory),
        link_bytes_per_s=_byte_count("--link", link),
        link_latency_ns=_latency_ns(link_latency),
        arrivals=arrivals,  # type: ignore[arg-type]
        pace=pace,
        affinity=affinity,
        slot_failures=tuple(parse_slot_failure(text) for text in slot_dies or ()),
    )


def figure_rows(figures: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """A report's figures as a table for people: times in ms, names without underscores."""
    rows: list[tuple[str, Any]] = []
    for key, value in figures.items():
        if key.endswith("_ns"):
            rows.append((key.removesuffix("_ns") + ", ms", None if value is None else value / 1e6))
        else:
            rows.append((key.replace("_", " "), value))
    return rows


def rule_sections(rules: Iterable[tuple[str, Any]], assumed: Sequence[str]) -> list[Section]:
    """How a report for people ends: the rules it stands on, and what had to be assumed, if anything."""
    from kvtape.cli.output import Section

    sections = [Section("rules", ("rule", "value"), list(rules))]
    if assumed:
        sections.append(Section("assumed", ("what",), [(text,) for text in assumed]))
    return sections


def workload(
    source: str, n_ctx_train: int | None, format_name: str = "auto", block_tokens: int | None = None
) -> tuple[tuple[Script, ...], str, int | None]:
    """Of a log, or of a trace as `kvtape import` would read it: its scripts with their attention, the log's logical
    digest, and its model's trained context: given, or found. The log that a trace becomes is gone afterwards.

    Raises SourceRejected for a trace that cannot be read, CurveError for options of a trace beside a log.
    """
    from kvtape.cli.args import log_place
    from kvtape.cli.block_source import is_log, require_log_alone

    if is_log(source):
        require_log_alone(source, format_name, block_tokens)
        return _read_workload(log_place(source), n_ctx_train)
    from tempfile import TemporaryDirectory

    from kvtape.traces.keys import KEY_BYTES, key_path

    with TemporaryDirectory(prefix="kvtape-") as folder:
        log = Path(folder) / "trace.duckdb"
        key_path(log).write_bytes(bytes(KEY_BYTES))  # nothing is kept: one trace has one digest
        _imported(source, log, format_name, block_tokens)
        return _read_workload(log, n_ctx_train)


def _imported(source: str, log: Path, format_name: str, block_tokens: int | None) -> None:
    from kvtape.cli.block_source import tell_warnings
    from kvtape.cli.output import kvtape_version
    from kvtape.traces.importers.importing import import_trace
    from kvtape.traces.importers.protocol import Asked

    asked = Asked(block_tokens)
    found = import_trace([source], log, kvtape_version=kvtape_version(), format_name=format_name, asked=asked)
    tell_warnings(found.warnings)


def _read_workload(log: Path, n_ctx_train: int | None) -> tuple[tuple[Script, ...], str, int | None]:
    from kvtape.cli.logs import opened
    from kvtape.sim.quality.attaching import with_attention
    from kvtape.sim.world.reading import read_scripts

    with opened(log) as tape:
        scripts = with_attention(read_scripts(tape), tape)
        source = tape.logical_digest()
    return scripts, source, _trained_context_of(scripts, n_ctx_train)


def _byte_count(option: str, text: str | None) -> int | None:
    """A size such as 512MiB, in bytes; 0 is let through. Raises SimulationError naming the option."""
    from kvtape.capacity.errors import CapacityError
    from kvtape.capacity.sizes import parse_size
    from kvtape.sim.errors import SimulationError

    if text is None:
        return None
    if text.strip() == "0":
        return 0
    try:
        return parse_size(text)
    except CapacityError as err:
        raise SimulationError(f"{option} {text}: {err}") from None


def _latency_ns(ms: float) -> int:
    """Whole nanoseconds of a latency in milliseconds. Raises SimulationError for what is no number."""
    from math import isfinite

    from kvtape.sim.errors import SimulationError

    if not isfinite(ms):
        raise SimulationError(f"--link-latency {ms}: needs a number of milliseconds")
    return round(ms * 1e6)


def _trained_context_of(scripts: Sequence[Script], given: int | None) -> int | None:
    """What is given, else that of the demo model where it is the log's; None where nobody knows."""
    from kvtape.backends.errors import UsageError
    from kvtape.cli.models import model_for_log, trained_context

    row = scripts[0].row
    if given is not None or row.model_fingerprint is None:
        return given
    try:
        return trained_context(model_for_log(None, row.model_fingerprint, row.model_name))
    except UsageError:
        return None
