"""What operations of each session took, by operation and way: sums over its events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from kvtape.traces.reader import Log

__all__ = ["IS_OPERATION", "Cost", "costs"]

IS_OPERATION: Final = "op NOT IN ('open', 'prompt', 'generate', 'close')"
"""Condition on rows of `events`: the engine did something, which took time."""


@dataclass(frozen=True, slots=True)
class Cost:
    """`tokens`: that the events were about; None where no event says. `computed`: tokens the engine computed in
    prefills and rebuilds. `elapsed_ns`: their sum; None where nothing was measured; `measured`: of how many events;
    `measured_tokens`: that those were about."""

    run_id: str
    session_id: str
    op: str
    way: str | None
    events: int
    tokens: int | None
    computed: int | None
    measured: int
    elapsed_ns: int | None
    measured_tokens: int | None


def costs(log: Log) -> list[Cost]:
    """Ordered by run, session, op and way. Refused and fatal operations took time too and are in it."""
    return [Cost(*row) for row in log.sql(_QUERY)[1]]


_QUERY = f"""
    SELECT run_id, session_id, op::VARCHAR, way::VARCHAR, count(*)::BIGINT, sum(n_tokens)::BIGINT,
        sum(physical_prefill_tokens)::BIGINT, count(elapsed_ns)::BIGINT, sum(elapsed_ns)::BIGINT,
        (sum(n_tokens) FILTER (elapsed_ns IS NOT NULL))::BIGINT
    FROM events WHERE {IS_OPERATION} GROUP BY ALL ORDER BY ALL"""
