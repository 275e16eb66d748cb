"""Tables of what-ifs and searches, for the panel of policies: every point, what cannot be, and the rules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from kvtape.report.data.policies import Comparison, Figure, Point
from kvtape.report.figures.parts import MIB, scaled
from kvtape.report.panel import Cell, Table

__all__ = ["policy_tables"]

_Column = tuple[str, Callable[[Point], Cell]]
_COLUMNS: Final[tuple[_Column, ...]] = (
    ("policy", lambda p: p.policy),
    ("budget (tokens)", lambda p: "as recorded" if p.budget is None else p.budget),
    ("on the front", lambda p: "clairvoyant" if p.clairvoyant else p.on_front),
    ("turns", lambda p: p.turns),
    ("not served", lambda p: p.not_served),
    ("TTFT p95 (s)", lambda p: scaled(p.ttft_p95.value, 1e9)),
    ("TPOT p95 (ms)", lambda p: scaled(p.tpot_p95.value, 1e6)),
    ("peak KV (MiB)", lambda p: scaled(p.peak_kv.value, MIB)),
    ("computed (tokens)", lambda p: p.computed),
    ("fewest possible", lambda p: p.least_computed),
    ("forgotten (tokens)", lambda p: p.forgotten),
    ("evicted (tokens)", lambda p: p.evicted),
)
_MACHINE: Final[tuple[_Column, ...]] = (
    ("slots", lambda p: "one each" if p.slots is None else p.slots),
    ("cold (tokens)", lambda p: "as recorded" if p.cold_tokens is None else p.cold_tokens),
    ("block (tokens)", lambda p: "as in the spec" if p.block is None else p.block),
)
_DRAWN: Final[tuple[_Column, ...]] = (
    ("share of draws on the front", lambda p: p.front_share),
    ("TTFT p95, 95 % (s)", lambda p: _interval(p.ttft_p95, 1e9)),
    ("TPOT p95, 95 % (ms)", lambda p: _interval(p.tpot_p95, 1e6)),
)
_ATTENDED: Final[tuple[_Column, ...]] = (
    ("retained mass", lambda p: p.retained.value),
    ("most possible", lambda p: p.most_retained),
)


def policy_tables(found: Comparison) -> list[Table]:
    """Figures of a table are medians where arrivals were drawn."""
    kind = ", HYPOTHETICAL costs" if found.hypothetical else ""
    title = f"{found.source}, {found.about}{kind}; costs {found.costs_digest[:12]}"
    columns = _columns(found)
    shown = [tuple(of(p) for _, of in columns) for p in found.points]
    tables = [Table(title, tuple(name for name, _ in columns), shown, found.left_out[0])]
    if found.refused:
        rows = [(r.policy, r.budget, r.why) for r in found.refused]
        tables.append(
            Table(f"{found.source}: cannot be simulated", ("policy", "budget (tokens)", "why"), rows, found.left_out[1])
        )
    said: list[tuple[Cell, ...]] = [(name.replace("_", " "), text) for name, text in found.rules.items()]
    said += [("assumed", text) for text in found.assumed]
    said += [("search", found.verdict)] if found.verdict else []
    said += [("use it", command) for command in found.commands]
    said += [("beyond a bound, which cannot be", text) for text in found.broken_bounds]
    tables.append(Table(f"{found.source}, {found.about}: rules", ("rule", "what it says"), said))
    return tables


def _columns(found: Comparison) -> tuple[_Column, ...]:
    """Without those in which every point says the same nothing: no machine asked for, nothing drawn or recorded."""
    machine = [(n, of) for n, of in _MACHINE if any(isinstance(of(p), int) for p in found.points)]
    attended = any(p.retained.value is not None for p in found.points)
    return (*_COLUMNS, *machine, *(_DRAWN if found.draws > 1 else ()), *(_ATTENDED if attended else ()))


def _interval(figure: Figure, unit: float) -> str:
    if figure.value is None:
        return "no turn has it"
    if figure.low is None or figure.high is None:
        return "not drawn"
    return f"{figure.low / unit:.3g} to {figure.high / unit:.3g}"
