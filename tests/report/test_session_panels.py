"""Panels of sessions: what is shown of many, long, broken-off and empty ones, and that the page says so."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from kvtape.planner.events import Op
from kvtape.report.data import views
from kvtape.report.data.history import STATES
from kvtape.report.data.runs import run_costs
from kvtape.report.figures.occupancy import occupancy_panel
from kvtape.report.figures.residency import residency_panel
from kvtape.report.figures.reuse import reuse_panel
from kvtape.report.figures.sessions import packed_sessions, session_data
from kvtape.report.figures.timeline import timeline_panel
from kvtape.report.packing import unpack
from kvtape.report.sources import choose
from kvtape.testing.event_script import EventScript
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.command import kvtape
from support.logs import KEY, TickClock, run_row, script, session_row, write_log
from support.long_log import write_long_log

PANELS = (residency_panel, timeline_panel, occupancy_panel, reuse_panel)


def write_events(path: Path, made: EventScript) -> Path:
    recorder = Recorder(path, run_row("run"), clock=TickClock(), key=KEY, max_latency_s=0)
    recorder.open_session(session_row("session", "run", content=False))
    for event in made.events:
        recorder.record(event)
    recorder.seal()
    return path


def test_the_page_holds_what_the_log_says(tmp_path: Path) -> None:
    with open_log(write_long_log(tmp_path / "l.duckdb", [300])) as log:
        sources = choose(log)
        (view,) = sources.views
        (about,) = session_data(sources.views)["sessions"]
        events = log.events("long", "session-1")
        packed = packed_sessions(sources.views)
        op, text, start, stop, at, elapsed, resident, _ = unpack(packed["events-0"], 8, about["columns"])
        assert about["n_events"] == about["columns"] == len(events)
        for i, event in enumerate(events):
            assert list(Op)[op[i]] is event.op
            assert [about["texts"][text[i]].startswith(event.reason or ""), event.start, event.stop] == [
                True,
                None if start[i] < 0 else start[i],
                None if stop[i] < 0 else stop[i],
            ]
            assert at[i] == event.at_ns - events[0].at_ns
            assert elapsed[i] == (-1 if event.elapsed_ns is None else event.elapsed_ns)
            assert event.resident_tokens in (None, resident[i])
        since, span, _, length, state = unpack(packed["states-0"], 5, about["rectangles"])
        now = (since <= 250) & (since + span > 250)
        held = log.state_at("long", "session-1", 250)
        kept = [STATES[s] in ("resident", "recent", "sink") for s in state[now]]
        assert length[now][kept].sum() == held.resident_tokens
        assert (about["sink"], about["recent"], about["context"]) == (4, 700, view.row.n_ctx)
        plans = sorted(log.plans("long", "session-1").items())
        changes = [
            [seq, p.budget_tokens]
            for (seq, p), before in zip(plans, [None, *(p.budget_tokens for _, p in plans)], strict=False)
            if p.budget_tokens != before
        ]
        assert about["plans"] == changes != []


def test_of_many_and_long_sessions_a_part_is_shown_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MOST_SESSIONS", 2)
    monkeypatch.setattr(views, "MOST_EVENTS", 200)
    with open_log(write_long_log(tmp_path / "l.duckdb", [60, 250, 80])) as log:
        sources = choose(log)
        assert [view.label for view in sources.views] == ["session-2", "session-3"]
        long, short = sources.views
        assert short.thin.every == 1
        assert long.thin.every == -(-long.n_events // 100)
        ops = [e.op for e in log.events("long", "session-2")]
        assert (long.evicts, long.admits) == (ops.count(Op.EVICT), ops.count(Op.ADMIT)) != (0, 0)
        lead = residency_panel(sources).lead
        assert "the 2 of 3 sessions that have the most events; choose others with --session" in lead
        assert f"session-2 ({long.n_events:,} events, every {long.thin.every})" in lead


def test_a_session_that_lost_events_is_shown_up_to_there(tmp_path: Path) -> None:
    made = EventScript(64)
    made.step("prefill", 8, 0)
    made.end("lost")
    with open_log(write_events(tmp_path / "l.duckdb", made)) as log:
        sources = choose(log)
        assert "session lost events from 2 on: what it held after that is not known" in residency_panel(sources).lead
        assert sources.views[0].n_events == 3


def test_a_workload_without_effects_has_no_empty_frames(tmp_path: Path) -> None:
    made = EventScript(64)
    made.put(Op.PROMPT, start=0, n_tokens=9)
    made.end("close")
    with open_log(write_events(tmp_path / "l.duckdb", made)) as log:
        for make in PANELS:
            panel = make(choose(log))
            assert not panel.figures
            assert "say what was asked, not what a cache held" in panel.missing[0].what
            assert "kvtape simulate l.duckdb" in panel.missing[0].command


def test_what_was_not_timed_is_said(tmp_path: Path) -> None:
    with open_log(write_log(tmp_path / "l.duckdb", [script()])) as log:
        panel = timeline_panel(choose(log))
        assert "No operation of these sessions was timed" in panel.missing[0].what
        assert "how long they took was not measured" in panel.figures[0].summary


def test_a_time_is_over_what_was_timed_and_tokens_over_everything(tmp_path: Path) -> None:
    made = EventScript(64)
    for _ in range(3):
        made.step("prefill", 8, 0)
    counts = [e.n_tokens or 0 for e in made.events]
    timed = {1: 5_000_000, 2: None, 3: 1_000_000}
    made.events = [
        replace(e, elapsed_ns=timed.get(e.seq), physical_prefill_tokens=e.n_tokens if e.seq else None)
        for e in made.events
    ]
    with open_log(write_events(tmp_path / "l.duckdb", made)) as log:
        panel = timeline_panel(choose(log))
        (row,) = panel.tables[0].rows
        assert row[3:] == (3, sum(counts[1:]), sum(counts[1:]), 6.0, 3.0, 6.0 / (counts[1] + counts[3]))
        assert "operations took 0.006 s in all" in panel.figures[0].summary
        (run,) = run_costs(log, ["run"])
        assert (run.computed, run.elapsed_ns) == (sum(counts[1:]), 6_000_000)


def test_budgets_of_plans_are_named_from_least_to_most(tmp_path: Path) -> None:
    with open_log(write_long_log(tmp_path / "l.duckdb", [300])) as log:
        sources = choose(log)
        budgets = {p.budget_tokens for p in log.plans("long", "session-1").values()}
        assert len(budgets) > 1
        summary = occupancy_panel(sources).figures[0].summary
        assert f"The plans worked to budgets of {min(budgets):,} to {max(budgets):,} tokens." in summary


def test_what_is_advised_for_a_workload_makes_a_report_with_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    request = '{"timestamp": %d, "input_length": 700, "output_length": 4, "hash_ids": [1, %d]}'
    Path("trace.jsonl").write_text("\n".join(request % (i, i + 2) for i in range(2)), encoding="utf-8")
    assert kvtape("import", "trace.jsonl", "--format", "mooncake", "--log", "a trace.duckdb").code == 0
    with open_log(Path("a trace.duckdb")) as log:
        (missing,) = residency_panel(choose(log)).missing
    commands = [shlex.split(line, comments=True) for line in missing.command.splitlines()]
    assert [command[:2] for command in commands] == [["kvtape", v] for v in ("calibrate", "simulate", "report")]
    for command in commands:
        ran = kvtape(*command[1:])
        assert ran.code == 0, ran.err
    with open_log(Path("simulated.duckdb")) as log:
        assert all(make(choose(log)).figures for make in PANELS)


def test_times_of_months_fit_on_the_page(tmp_path: Path) -> None:
    made = EventScript(64)
    for _ in range(2):
        made.step("prefill", 8, 0)
    late = 2**60
    made.events = [replace(e, at_ns=e.seq * late // 2, elapsed_ns=late if e.seq == 2 else None) for e in made.events]
    with open_log(write_events(tmp_path / "l.duckdb", made)) as log:
        views = choose(log).views
        (about,) = session_data(views)["sessions"]
        *_, at, elapsed, _, _ = unpack(packed_sessions(views)["events-0"], 8, about["columns"])
        tick = about["tick_ns"]
        assert (at[-1], elapsed.tolist()) == (late // tick, [-1, -1, late // tick])
        assert 1 < tick < late // 2**40
