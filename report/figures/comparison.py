"""Figures of one what-if or search, for the panel of policies: cost against memory, and each bound against budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvtape.planner.grammar import SpecError, parse_spec
from kvtape.report.data.policies import Comparison, Figure, Point
from kvtape.report.figures.chart import Axis, Chart, Mark, Series, chart_figure
from kvtape.report.figures.parts import MIB
from kvtape.report.panel import Figure as Drawing

__all__ = ["comparison_figures"]


def comparison_figures(found: Comparison, prefix: str) -> list[Drawing]:
    """Those that its points have figures for; `prefix`: of their ids."""
    drawn = [_cost_figure(found, prefix), _computed_figure(found, prefix), _retained_figure(found, prefix)]
    return [figure for figure in drawn if figure is not None]


def _cost_figure(found: Comparison, prefix: str) -> Drawing | None:
    """Time to the first token against memory, in which a front can be seen; the front itself is over more."""
    shown = [p for p in found.points if p.ttft_p95.value is not None and p.peak_kv.value is not None]
    if not shown:
        return None
    whole = [p for p in shown if p.serves_all]
    groups = [*_families(whole), ("not every turn served", [p for p in shown if not p.serves_all])]
    series = [
        Series(
            name,
            [_over(p.peak_kv.value, MIB) for p in of],
            [_over(p.ttft_p95.value, 1e9) for p in of],
            "points",
            **_ends([p.ttft_p95 for p in of], 1e9),
            texts=[_text(p) for p in of],
        )
        for name, of in groups
        if of
    ]
    front = sorted((_over(p.peak_kv.value, MIB), _over(p.ttft_p95.value, 1e9)) for p in shown if p.on_front)
    if front:
        series.append(Series("the front", [x for x, _ in front], [y for _, y in front], "dashed"))
    return chart_figure(
        f"{prefix}-cost",
        f"Time to first token against memory: {found.source}, {found.about}",
        _cost_summary(found, shown),
        Chart(Axis("peak KV", "MiB"), Axis("time to first token, p95", "s"), tuple(series)),
    )


def _cost_summary(found: Comparison, shown: Sequence[Point]) -> str:
    on = [f"{p.policy} at {_tokens(p.budget)}" for p in shown if p.on_front]
    drawn = (
        f"Medians of {found.draws} draws of the arrivals (seed {found.seed}) and the middle 95 % of them."
        if found.draws > 1
        else "Arrivals as recorded, so there is no interval."
    )
    if not found.objectives:
        return f"{_count(found, shown)}. {found.verdict or ''} {drawn}".strip()
    return (
        f"{_count(found, shown)}, {len(on)} on the Pareto front over {len(found.objectives)} figures "
        f"({', '.join(map(_figure_name, sorted(found.objectives)))}): {'; '.join(on) or 'none'}. {drawn}"
    )


def _count(found: Comparison, shown: Sequence[Point]) -> str:
    left = found.left_out[0]
    return f"{len(shown)} points" + (f" ({left:,} more are left out)" if left else "")


def _figure_name(name: str) -> str:
    """A figure of a what-if in words: its times and sizes have units of their own on the page."""
    plain = name.removesuffix("_ns").removesuffix("_bytes").removesuffix("_tokens").replace("_", " ")
    return plain.replace("ttft", "TTFT").replace("tpot", "TPOT").replace("kv", "KV")


def _computed_figure(found: Comparison, prefix: str) -> Drawing | None:
    """Only points that served every turn: what was not served was not computed either."""
    shown = [p for p in found.points if p.serves_all and p.computed is not None and p.budget is not None]
    least = [p.least_computed for p in shown if p.least_computed is not None]
    if not shown or not least:
        return None
    left_out = len(found.points) - len(shown)
    series = [*_by_budget(shown, lambda p: p.computed), _bound(shown, lambda p: p.least_computed, "fewest possible")]
    best = min(shown, key=lambda p: (p.computed or 0, p.budget or 0))
    return chart_figure(
        f"{prefix}-computed",
        f"Prompt tokens computed against budget: {found.source}, {found.about}",
        f"Prefilled and computed again, in points that serve every turn ({left_out} of {len(found.points)} do not). "
        f"Fewest: {best.policy} with {best.computed:,}; no policy can do with fewer than {min(least):,}, which is the "
        f"clairvoyant bound.",
        Chart(Axis("budget", "tokens"), Axis("tokens computed"), tuple(series)),
    )


def _retained_figure(found: Comparison, prefix: str) -> Drawing | None:
    shown = [p for p in found.points if p.retained.value is not None and p.budget is not None]
    if not shown:
        return None
    series = list(_by_budget(shown, lambda p: p.retained.value))
    if any(p.most_retained is not None for p in shown):
        series.append(_bound(shown, lambda p: p.most_retained, "most possible"))
    best = max(shown, key=lambda p: (p.retained.value or 0, -(p.budget or 0)))
    return chart_figure(
        f"{prefix}-retained",
        f"Attention retained against budget: {found.source}, {found.about}",
        f"Share of the dense attention mass of all queries that lies on rows that were resident, at least. Most: "
        f"{best.policy} at {_tokens(best.budget)} with {best.retained.value:.4f}; the dashed line is the most that any "
        f"policy could keep, knowing all queries.",
        Chart(Axis("budget", "tokens"), Axis("retained attention mass", "share"), tuple(series)),
    )


def _by_budget(points: Sequence[Point], value: Callable[[Point], float | None]) -> Iterable[Series]:
    for name, of in _families(points):
        known = sorted((p.budget or 0, v, _text(p)) for p in of if (v := value(p)) is not None)
        budgets = [budget for budget, _, _ in known]
        mark: Mark = "line" if len(set(budgets)) == len(budgets) > 1 else "points"
        yield Series(name, budgets, [v for _, v, _ in known], mark, texts=[text for *_, text in known])


def _bound(points: Sequence[Point], value: Callable[[Point], float | None], name: str) -> Series:
    """The bound at each budget; of several machines with one budget the loosest."""
    at: dict[int, float] = {}
    for p in points:
        v = value(p)
        if v is not None and p.budget is not None:
            at[p.budget] = v if p.budget not in at else max(at[p.budget], v)
    return Series(name, sorted(at), [at[budget] for budget in sorted(at)], "dashed" if len(at) > 1 else "points")


def _families(points: Iterable[Point]) -> list[tuple[str, list[Point]]]:
    """Points by the name of their policy: its numbers differ from budget to budget."""
    of: dict[str, list[Point]] = {}
    for point in points:
        of.setdefault(_name(point), []).append(point)
    return list(of.items())


def _name(point: Point) -> str:
    try:
        spec = parse_spec(point.policy)
    except SpecError:
        return point.policy
    name = spec.target or spec.name
    return f"{name} (clairvoyant)" if point.clairvoyant else name


def _text(p: Point) -> str:
    where = f"{p.policy} at {_tokens(p.budget)}"
    machine = "".join(
        f", {name} {n}" for name, n in (("slots", p.slots), ("cold tokens", p.cold_tokens)) if n is not None
    )
    share = "" if p.front_share is None else f" in {p.front_share:.0%} of the draws"
    front = f"; on the front{share}" if p.on_front else ""
    served = f"; {p.not_served} of {p.turns} turns not served" if p.not_served else ""
    return where + machine + front + served


def _tokens(budget: int | None) -> str:
    return "the recorded context" if budget is None else f"{budget:,} tokens"


def _over(value: float | None, unit: float) -> float:
    return 0.0 if value is None else value / unit


def _ends(figures: Sequence[Figure], unit: float) -> dict[str, list[float]]:
    if any(f.low is None or f.high is None for f in figures):
        return {}
    return {"low": [_over(f.low, unit) for f in figures], "high": [_over(f.high, unit) for f in figures]}
