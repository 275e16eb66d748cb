"""`kvtape fleet`: a fleet's requests over one pool of prefix blocks, in modelled time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson, BlockTokens, LogOrTrace, TraceFormat
from kvtape.cli.simulation import CostsPath, Pace, figure_rows, rule_sections

if TYPE_CHECKING:
    from kvtape.cli.output import Section
    from kvtape.sim.blocks.block_trace import Requests
    from kvtape.sim.costs.model import CostTable

__all__ = ["fleet"]


def fleet(
    source: LogOrTrace,
    costs: CostsPath,
    pool_blocks: Annotated[
        int,
        typer.Option(
            "--pool-blocks", metavar="N", min=1, help="KV blocks that all requests share.", show_default=False
        ),
    ],
    slots: Annotated[
        int | None,
        typer.Option(
            "--slots", metavar="N", min=1, help="Requests at once; default: as many as the pool has room for."
        ),
    ] = None,
    chunk: Annotated[int, typer.Option("--chunk", metavar="N", min=1, help="Tokens in one prefill call.")] = 512,
    pace: Pace = 1.0,
    format_name: TraceFormat = "auto",
    block_tokens: BlockTokens = None,
    out: Annotated[
        Path | None, typer.Option("--log", metavar="OUT", help="Write what happened to each request to a new log.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a fleet's requests over one pool of prefix blocks, in modelled time.

    For traces that name the blocks of their prompts: what one request computed is found by all others, as long as the
    pool keeps it. Where kvtape simulate follows every token of a conversation, this follows blocks.

    \b
    Example:
      kvtape fleet conversation_trace.jsonl --costs costs.json --pool-blocks 16384 --log fleet.duckdb
    """
    from kvtape.cli.output import emit, report_digest
    from kvtape.cli.progress import progress
    from kvtape.cli.recording import new_log, run_row
    from kvtape.sim.costs.model import read_costs
    from kvtape.sim.fleet.figures import figures, rules
    from kvtape.sim.fleet.serving import Fleet, serve

    asked = Fleet(pool_blocks, slots, chunk, pace)
    table = read_costs(costs)
    place = None if out is None else new_log(out)
    requests = _requests(source, format_name, block_tokens)
    with progress("serving") as bar:
        served = serve(requests, asked, table, progress=bar.update)
    found, held = figures(requests, served), rules(asked, requests.trace.block_tokens)
    config = {
        "verb": "fleet",
        "rules": held,
        "costs_digest": report_digest(table.to_json()),
        "block_tokens": requests.trace.block_tokens,
        "parent_digest": requests.trace.digest,
    }
    if place is not None:
        from kvtape.sim.fleet.recording import write_fleet_log

        write_fleet_log(place, run_row("simulation", config, {"modelled": "1"}, 0), requests, served)
    body = {
        "figures": found,
        "rules": held,
        "assumed": _assumed(table),
        "costs_digest": config["costs_digest"],
        "config_digest": report_digest(config),
        "source_digest": requests.trace.digest,
        "seed": None,
    }
    # What came of it is the same wherever it is written to.
    where = {"log": None if place is None else str(place)}
    emit("fleet", body | where, _sections(body), as_json=as_json, digest=report_digest(body))


def _requests(source: str, format_name: str, block_tokens: int | None) -> Requests:
    from kvtape.cli.block_source import is_log, noted, require_log_alone

    if is_log(source):
        from kvtape.cli.args import log_place
        from kvtape.cli.logs import opened
        from kvtape.sim.blocks.from_log import read_log_requests

        require_log_alone(source, format_name, block_tokens)
        with opened(log_place(source)) as log:
            return read_log_requests(log)
    from kvtape.sim.blocks.from_file import read_requests_file
    from kvtape.traces.importers.protocol import Asked

    with noted() as notes:
        return read_requests_file(source, format_name=format_name, asked=Asked(block_tokens), notes=notes)


def _assumed(table: CostTable) -> list[str]:
    said = table.assumptions({"prefill", "decode"})
    if not table.origin.hypothetical:
        said.append(f"the fleet's model costs what {table.origin.model_name} costs on {table.origin.backend}")
    return said


def _sections(body: dict[str, Any]) -> list[Section]:
    from kvtape.cli.output import Section

    figures = Section("fleet", ("what", "value"), figure_rows(body["figures"]))
    return [figures, *rule_sections(body["rules"].items(), body["assumed"])]
