"""Scripts with the dense attention of their tapes, where the log has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvtape.planner.scores import DENSE
from kvtape.sim.errors import NoAttention
from kvtape.sim.quality.attention_log import ScoredLog, read_attention
from kvtape.sim.world.script import Script

__all__ = ["with_attention"]


def with_attention(scripts: Sequence[Script], log: ScoredLog) -> tuple[Script, ...]:
    """Scripts of the log's own run, each with its map; where one cannot be had, all without, and why."""
    run = log.default_run().run_id
    if not log.arrow("events", "run_id = ? AND op = 'score' AND reason = ?", [run, DENSE]).num_rows:
        return tuple(scripts)
    try:
        maps = read_attention(log, run, {s.row.session_id for s in scripts})
    except NoAttention as err:
        return tuple(replace(s, no_attention=str(err)) for s in scripts)
    return tuple(replace(s, attention=maps[s.row.session_id]) for s in scripts)
