"""A fleet's run as a log: every request a session, with what it found in the pool and how long it took.

    open      prompt (reused, prefilled; to the first token)   generate (the answer)   close
              the hashes of its blocks stand beside the prompt

Rows as of an imported trace: no residency is folded, for the blocks are the pool's and not a session's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from kvtape.planner.rows import RunRow
from kvtape.sim.blocks.block_trace import Requests
from kvtape.sim.fleet.serving import UNSERVED, Served
from kvtape.traces.importers.events import EventMaker
from kvtape.traces.importers.protocol import Request
from kvtape.traces.importers.writing import Batch, record_batches, write_new_log

__all__ = ["write_fleet_log"]


def write_fleet_log(log: Path, run: RunRow, requests: Requests, served: Served) -> None:
    """A new, sealed log. Raises LogExists, LogWriteFailed; there is then none."""

    def batches(key: bytes) -> Iterator[Batch]:
        maker = EventMaker(run.run_id, "modelled", 0, key, content=False)
        return record_batches(((r, f"r{r.line:08}") for r in _records(requests, served)), maker)

    write_new_log(log, run, batches)


def _records(requests: Requests, served: Served) -> Iterator[Request]:
    trace = requests.trace
    columns = (
        requests.prompts,
        requests.outputs,
        served.arrived,
        served.began,
        served.prompted,
        served.ended,
        served.reused,
    )
    starts = trace.starts.tolist()
    for i, (n, output, arrived, began, prompted, ended, reused) in enumerate(
        zip(*(c.tolist() for c in columns), strict=True)
    ):
        hashes = trace.ids[starts[i] : starts[i + 1]].tolist()
        at = {"line": i, "at_ns": arrived, "input_tokens": n, "hashes": hashes, "block_tokens": trace.block_tokens}
        if began == UNSERVED:
            yield Request(**at, detail={"unserved": "more blocks than the pool has"})
        else:
            yield Request(
                **at,
                output_tokens=output,
                reused=reused,
                first_token_ns=prompted - arrived,
                elapsed_ns=ended - arrived,
                detail={"queued_ns": began - arrived},
            )
