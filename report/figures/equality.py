"""Panel of equality: did every engine hold what the log says, how is that known, and where did it part first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from kvtape.report.data.commands import EQUALITY, RECORD, repeated
from kvtape.report.data.equality import RunPair, run_pairs, verdict
from kvtape.report.figures.chart import Axis, Chart, Series, chart_figure
from kvtape.report.figures.parts import turned
from kvtape.report.given.reading import Named
from kvtape.report.given.shapes import FirstDivergence, Replay
from kvtape.report.panel import Cell, Figure, Missing, Panel, Table
from kvtape.report.sources import Sources

__all__ = ["equality_panel"]

_LEAD: Final = (
    "A replay carries the log out again on an engine and asks the engine's own memory, after every event that changes "
    "what is resident, which rows it holds; each row is known for its token by its key. Equal means: the same tokens "
    "at every such event, every row identified, and logits within the gate. Counts are sums over all sessions."
)
_COLUMNS: Final = (
    *("target", "verdict", "way", "events that change residency", "of these, memory read", "rows found"),
    *("of these, identified", "not executed", "logit checkpoints", "mean KL (nats)", "max KL (nats)", "top-1 (share)"),
    *("engine", "key/value types"),
)
_PAIR_COLUMNS: Final = (
    *("run", "beside", "verdict", "sessions in both", "in one alone", "events compared"),
    *("first parts in", "at event (seq)", "operation", "what"),
)
_MOST_SESSIONS: Final = 200
_MOST_PAIRS: Final = 50


def equality_panel(sources: Sources) -> Panel:
    """Replays that were given, and runs of the log beside each other. Raises LogUnreadable."""
    found = sources.given.of(Replay)
    pairs = run_pairs(sources.log, [run.run_id for run in sources.runs[: _MOST_PAIRS + 1]], sources.recorded)
    figures = [f for n, replay in enumerate(found, 1) if (f := _kl(replay, f"equality-{n}")) is not None]
    tables = [table for replay in found for table in _tables(replay)]
    if pairs:
        tables.append(_pairs(pairs, len(sources.runs) - 1 - len(pairs)))
    missing = []
    if not found:
        command = repeated(sources.log.path.name, sources.sessions).get(EQUALITY)
        given = "No replay was given, so nothing here says what an engine held. Show one with --with replay.json."
        none = "Nothing to replay: these sessions were not recorded on an engine that kvtape carries events out on."
        missing.append(Missing(given if command else none, command or RECORD))
    return Panel("equality", "Equality", _LEAD, tuple(figures), tuple(tables), tuple(missing))


def _tables(named: Named[Replay]) -> Iterable[Table]:
    source, replay = named.name, named.value
    whole = "EQUAL" if replay.equal else "NOT EQUAL"
    mean_kl, top1 = replay.tolerances.get("mean_kl"), replay.tolerances.get("top1")
    gate = "" if mean_kl is None else f"; gate of each session: mean KL at most {mean_kl:g} nats"
    gate += "" if top1 is None else f", top-1 at least {top1:g}"
    rows: list[tuple[Cell, ...]] = [
        (
            *(t.name, verdict(t), t.way, t.residency_events, t.witness_positions, t.witness_rows),
            *(t.witness_identities, t.not_executed, t.checkpoints, t.mean_kl, t.max_kl, t.top1),
            *(t.engine_version, t.kv_types),
        )
        for t in replay.backends
    ]
    yield turned(Table(f"{source}: {whole}{gate}", _COLUMNS, rows))
    yield _first(source, replay.first_divergence)
    shown = replay.sessions[:_MOST_SESSIONS]
    columns = ("session", "events", "of these, followed", "events lost from")
    lost: list[tuple[Cell, ...]] = [
        (s.session, s.events, s.foldable, "none lost" if s.lost_at is None else s.lost_at) for s in shown
    ]
    yield Table(f"{source}: sessions", columns, lost, len(replay.sessions) - len(shown))
    if replay.notes:
        yield Table(f"{source}: remarks", ("remark",), [(note,) for note in replay.notes])


def _first(source: str, first: FirstDivergence | None) -> Table:
    if first is None:
        return Table(f"{source}: first divergence", ("what", "value"), [("none", "no target parted anywhere")])
    rows: list[tuple[Cell, ...]] = [
        ("session", first.session),
        ("event (seq)", first.seq),
        ("operation", first.op),
        ("target", first.backend),
        ("what", first.what),
        ("expected", _short(first.expected)),
        ("found", _short(first.found)),
    ]
    rows += [(f"event {e.get('seq', 'unknown')} before it", _event(e)) for e in first.context]
    return Table(f"{source}: first divergence", ("what", "value"), rows)


def _event(entry: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in entry.items() if name != "seq" and value is not None)


def _short(value: Any, most: int = 200) -> str:
    text = "unknown" if value is None else str(value)
    return text if len(text) <= most else f"{text[:most]} ..."


def _kl(named: Named[Replay], name: str) -> Figure | None:
    gate = named.value.tolerances
    known = [t for t in named.value.backends if t.mean_kl is not None and t.max_kl is not None]
    if not known:
        return None
    names = tuple(t.name for t in known)
    places = list(range(len(known)))
    texts = [f"{t.checkpoints} checkpoints" for t in known]
    series = [
        Series("mean", places, [t.mean_kl or 0.0 for t in known], "points", texts=texts),
        Series("max", places, [t.max_kl or 0.0 for t in known], "points", texts=texts),
    ]
    if "mean_kl" in gate and len(known) > 1:
        series.append(Series("gate of the mean", places, [gate["mean_kl"]] * len(known), "dashed"))
    told = "; ".join(f"{t.name}: mean {t.mean_kl:.2g}, max {t.max_kl:.2g} over {t.checkpoints}" for t in known)
    noise = gate.get("noise_floor_mean_kl")
    floor = "" if noise is None else f" Two correct runs of a quantised model differ by a mean of about {noise:g} nats."
    return chart_figure(
        name,
        f"Distance from the dense reference: {named.name}",
        f"KL divergence in nats at the checkpoints. {told}.{floor}",
        Chart(
            Axis("target", names=names),
            Axis("KL", "nats", log=all(t.mean_kl and t.max_kl for t in known)),
            tuple(series),
        ),
    )


def _pairs(pairs: Iterable[RunPair], left_out: int) -> Table:
    rows = [
        (
            *(p.first_run, p.other_run, _pair_verdict(p), p.shared_sessions, p.lone_sessions, p.compared),
            *(("nowhere",) * 4 if p.what is None else (p.session, p.seq, p.op, p.what)),
        )
        for p in pairs
    ]
    title = "Runs of this log, event by event that changes residency; from what they recorded, no memory was asked"
    return Table(title, _PAIR_COLUMNS, rows, left_out)


def _pair_verdict(pair: RunPair) -> str:
    if not pair.shared_sessions:
        return "no session in common"
    return "equal" if pair.equal else "different"
