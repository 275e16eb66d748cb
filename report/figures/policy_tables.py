"""Tables of what-ifs and searches, for the panel of policies: every point, what cannot be, and the rules."""

from __future__ import annotations

from typing import Final

from kvtape.report.data.policies import Comparison, Figure, Point
from kvtape.report.panel import Cell, Table

__all__ = ["policy_tables"]

_MIB: Final = 2**20
_COLUMNS: Final = (
    *("policy", "budget (tokens)", "slots", "cold (tokens)", "on the front", "share of draws", "turns", "not served"),
    *("TTFT p95 (s)", "TTFT p95, 95 % (s)", "TPOT p95 (ms)", "peak KV (MiB)", "computed (tokens)", "fewest possible"),
    *("forgotten (tokens)", "evicted (tokens)", "retained mass", "most possible"),
)


def policy_tables(found: Comparison) -> list[Table]:
    """Figures of a table are medians where arrivals were drawn."""
    kind = ", HYPOTHETICAL costs" if found.hypothetical else ""
    title = f"{found.source}, {found.about}{kind}; costs {found.costs_digest[:12]}"
    attended = any(p.retained.value is not None for p in found.points)
    tables = [Table(title, _COLUMNS, [_row(p, attended=attended) for p in found.points])]
    if found.refused:
        rows = [(r.policy, r.budget, r.why) for r in found.refused]
        tables.append(Table(f"{found.source}: cannot be simulated", ("policy", "budget (tokens)", "why"), rows))
    said: list[tuple[Cell, ...]] = [(name.replace("_", " "), text) for name, text in found.rules.items()]
    said += [("assumed", text) for text in found.assumed]
    said += [("search", found.verdict)] if found.verdict else []
    said += [("use it", command) for command in found.commands]
    said += [("beyond a bound, which cannot be", text) for text in found.broken_bounds]
    tables.append(Table(f"{found.source}, {found.about}: rules", ("rule", "what it says"), said))
    return tables


def _row(p: Point, *, attended: bool) -> tuple[Cell, ...]:
    front = "no policy can do it" if p.clairvoyant else p.on_front
    budget = "as recorded" if p.budget is None else p.budget
    machine = ("one each" if p.slots is None else p.slots, "as recorded" if p.cold_tokens is None else p.cold_tokens)
    share = "not drawn" if p.front_share is None else p.front_share
    retained = (p.retained.value, p.most_retained) if attended else ("not recorded",) * 2
    return (
        *(p.policy, budget, *machine, front, share, p.turns, p.not_served),
        *(_scaled(p.ttft_p95.value, 1e9), _interval(p.ttft_p95, 1e9), _scaled(p.tpot_p95.value, 1e6)),
        *(_scaled(p.peak_kv.value, _MIB), p.computed, p.least_computed, p.forgotten, p.evicted, *retained),
    )


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _interval(figure: Figure, unit: float) -> str:
    if figure.value is None:
        return "no turn has it"
    if figure.low is None or figure.high is None:
        return "none: as recorded"
    return f"{figure.low / unit:.3g} to {figure.high / unit:.3g}"
