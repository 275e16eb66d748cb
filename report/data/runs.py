"""What each run of a log cost: recorded, replayed, simulated side by side, and which of them nothing beats.

Runs are compared where they had the same workload (the same sessions offered as many tokens in each turn) and are of
one kind: modelled times beside measured ones would compare the model with the machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvtape.report.data.costs import IS_OPERATION
from kvtape.sim.errors import SimulationError
from kvtape.sim.quality.reuse import least_prefilled
from kvtape.sim.whatif.pareto import Better, mark_front
from kvtape.sim.world.reading import read_scripts
from kvtape.traces.reader import Log

__all__ = ["MOST_TOKENS", "OBJECTIVES", "RunCost", "run_costs"]

OBJECTIVES: Final[Mapping[str, Better]] = {
    "computed": "less",
    "elapsed_ns": "less",
    "peak_resident": "less",
    "forgotten": "less",
}
"""What runs are compared by."""

MOST_TOKENS: Final = 1_000_000
"""Offered by the default run's prompts: for more the bound is not computed here; a what-if has it."""

_TURNS = """
SELECT run_id, count(*) AS turns, sum(prompt_tokens)::BIGINT AS offered, sum(completion_tokens)::BIGINT AS generated,
       sum(reused)::BIGINT AS reused, sum(forgotten)::BIGINT AS forgotten, sum(evicted_tokens)::BIGINT AS evicted,
       sum(recomputed_tokens)::BIGINT AS recomputed, sum(refused)::BIGINT AS refused,
       md5(string_agg(session_id || chr(0) || turn || chr(0) || coalesce(prompt_tokens, -1), chr(1)
                      ORDER BY session_id, turn)) AS workload
FROM turns GROUP BY run_id
"""
_COSTS = f"""
SELECT run_id, sum(physical_prefill_tokens)::BIGINT AS computed, sum(elapsed_ns)::BIGINT AS elapsed_ns FROM events
WHERE {IS_OPERATION} GROUP BY run_id
"""
_PROMPTS = "SELECT run_id, sum(n_tokens)::BIGINT AS tokens FROM events WHERE op = 'prompt' GROUP BY run_id"
_PEAKS = """
SELECT run_id, max(resident_tokens)::BIGINT AS peak_resident, max(kv_bytes)::BIGINT AS peak_kv FROM events
GROUP BY run_id
"""
_FIGURES: Final = (
    *("offered", "generated", "reused", "forgotten", "evicted", "recomputed", "refused"),
    *("computed", "elapsed_ns", "peak_resident", "peak_kv", "least_computed"),
)


@dataclass(frozen=True, slots=True)
class RunCost:
    """One run, all its sessions together. Tokens; `elapsed_ns`: of all operations; peaks: of the fullest session.

    None: the log does not say. `computed`: tokens that the engine computed in prefills and rebuilds; `least_computed`:
    the fewest of the prompts' tokens that any policy has to (clairvoyant), of runs with the default run's workload.
    `rivals`: runs of the same kind and workload that it is compared with, `on_front`: whether none of them beats it;
    None without any.
    """

    run_id: str
    kind: str
    policies: tuple[str, ...]
    sessions: int
    turns: int
    offered: int | None
    generated: int | None
    reused: int | None
    forgotten: int | None
    evicted: int | None
    recomputed: int | None
    refused: int | None
    computed: int | None
    elapsed_ns: int | None
    peak_resident: int | None
    peak_kv: int | None
    least_computed: int | None
    rivals: int
    on_front: bool | None


def run_costs(log: Log, run_ids: Sequence[str]) -> tuple[RunCost, ...]:
    """One for each run, in their order. Raises LogUnreadable."""
    kinds = {run.run_id: run.kind for run in log.runs()}
    turns, costs, peaks = (_by_run(log, query) for query in (_TURNS, _COSTS, _PEAKS))
    found = [{**turns.get(r, {}), **costs.get(r, {}), **peaks.get(r, {})} for r in run_ids]
    default = turns.get(log.default_run().run_id, {})
    bound = _least_computed(log)
    peers: dict[tuple[str, Any], list[int]] = {}
    for i, run_id in enumerate(run_ids):
        workload = found[i].get("workload")
        found[i]["least_computed"] = bound if workload == default.get("workload") else None
        if workload is not None:
            peers.setdefault((kinds[run_id], workload), []).append(i)
    front: dict[int, bool] = {}
    for of in peers.values():
        if len(of) > 1:
            rows = [{**found[i], "not_served": found[i]["refused"] or 0} for i in of]
            front |= dict(zip(of, mark_front(rows, OBJECTIVES), strict=True))
    rivals = {i: len(of) - 1 for of in peers.values() for i in of}
    return tuple(
        _cost(log, run_id, kinds[run_id], found[i], rivals.get(i, 0), front.get(i)) for i, run_id in enumerate(run_ids)
    )


def _least_computed(log: Log) -> int | None:
    """Of the default run. None where its prompts cannot be read, or are too long."""
    prompts = _by_run(log, _PROMPTS).get(log.default_run().run_id)
    if prompts is None or prompts["tokens"] > MOST_TOKENS:
        return None
    try:
        return sum(least_prefilled(script) for script in read_scripts(log))
    except SimulationError:
        return None


def _cost(log: Log, run_id: str, kind: str, found: Mapping[str, Any], rivals: int, on_front: bool | None) -> RunCost:
    sessions = log.sessions(run_id)
    return RunCost(
        run_id=run_id,
        kind=kind,
        policies=tuple(dict.fromkeys(s.policy for s in sessions if s.policy is not None)),
        sessions=len(sessions),
        turns=found.get("turns", 0),
        rivals=rivals,
        on_front=on_front,
        **{name: found.get(name) for name in _FIGURES},
    )


def _by_run(log: Log, query: str) -> dict[str, dict[str, Any]]:
    columns, rows = log.sql(query)
    return {str(row[0]): dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
