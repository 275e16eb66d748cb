"""`kvtape top`: its numbers are those of the fold, its frames fit the terminal, and the recorder goes on unawares."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from kvtape.cli.top_screen import frame
from kvtape.cli.top_view import Happening, SessionLine, View, read_view
from kvtape.planner.events import Op
from kvtape.traces.reader import open_log
from support.command import kvtape
from support.logs import script, write_log
from support.repository import ROOT
from support.scripted import Script
from support.terminal import Terminal

SECOND = 10**9


def test_numbers_are_those_of_the_events_and_of_the_fold(tmp_path: Path) -> None:
    broken = Script(session_id="broken")
    broken.prefill(list(range(30)))
    broken.fatal()
    log = write_log(tmp_path / "l.duckdb", [script("whole"), broken])
    with open_log(log) as tape:
        view = read_view(tape)
        assert {s.session_id: s.state for s in view.sessions} == {"whole": "closed", "broken": "fatal"}
        assert view.sealed
        for line in view.sessions:
            events = tape.events(line.run_id, line.session_id)
            evicts = [e for e in events if e.op is Op.EVICT]
            assert line.events == len(events) == line.seq + 1
            assert line.resident == tape.state_at(line.run_id, line.session_id).resident_tokens
            assert (line.evicts, line.evicted) == (len(evicts), sum(e.n_tokens or 0 for e in evicts))
            assert line.computed == sum(e.n_tokens or 0 for e in events if e.op in (Op.PREFILL, Op.DECODE))
            assert line.refusals == sum(e.op is Op.REFUSE for e in events)
    assert [h.op for h in view.latest if h.session_id == "broken"] == ["fatal"]
    body = json.loads(kvtape("top", log, "--json").out)
    assert (body["fatals"], body["events"]) == (1, view.events)
    assert body["evicted_tokens"] == sum(s.evicted for s in view.sessions)
    only = json.loads(kvtape("top", log, "--json", "--session", "whole").out)
    assert [s["session_id"] for s in only["sessions"]] == ["whole"]
    assert only["events"] < body["events"]


def test_what_happened_in_a_session_is_told_whatever_the_others_do(tmp_path: Path) -> None:
    busy = Script(session_id="busy", n_ctx=512)
    busy.prefill(list(range(200)))
    for start in range(60):
        busy.evict(start, start + 1)
    log = write_log(tmp_path / "l.duckdb", [script("early"), busy])
    early = json.loads(kvtape("top", log, "--json", "--session", "early").out)["latest"]
    assert [h["op"] for h in early if h["op"] == "evict"]
    both = json.loads(kvtape("top", log, "--json").out)["latest"]
    assert len(both) == 50
    assert {h["session_id"] for h in both} == {"busy"}
    assert both[0]["seq"] == 61


def test_the_rate_is_that_of_the_last_ten_seconds(log: Path) -> None:
    with open_log(log) as tape:
        [line] = read_view(tape).sessions
        events = tape.events(line.run_id, line.session_id)
    computed = [e for e in events if e.op in (Op.PREFILL, Op.DECODE)]
    assert events[-1].at_ns - events[0].at_ns < 10 * SECOND
    span = max(e.at_ns + (e.elapsed_ns or 0) for e in computed) - computed[0].at_ns
    assert line.tokens_per_s == pytest.approx(sum(e.n_tokens or 0 for e in computed) * SECOND / span)


def test_a_pipe_gets_one_look(log: Path) -> None:
    ran = kvtape("top", log)
    assert ran.code == 0
    assert "\tclosed\t" in ran.out
    assert "\x1b" not in ran.out
    assert kvtape("top", log, "--once").out == ran.out


def test_what_is_not_there_is_one_line(log: Path, tmp_path: Path) -> None:
    ran = kvtape("top", tmp_path / "none.duckdb")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    ran = kvtape("top", log, "--session", "mian")
    assert ran.code == 2
    assert "it has: main" in ran.err


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=90)
counts = st.integers(0, 10**9)
lines = st.builds(
    SessionLine,
    run_id=st.just("r"),
    session_id=names,
    kind=st.just("live"),
    op=st.sampled_from([str(op) for op in Op]),
    events=counts,
    seq=counts,
    resident=counts,
    n_ctx=st.none() | st.integers(1, 10**6),
    kv_bytes=st.none(),
    evicts=counts,
    evicted=counts,
    refusals=counts,
    computed=counts,
    tokens_per_s=st.none() | st.floats(0, 10**6),
    fatal=st.none() | names,
    lost=st.booleans(),
)
happenings = st.builds(
    Happening,
    run_id=st.just("r"),
    session_id=names,
    seq=counts,
    op=st.sampled_from(["evict", "fatal", "refuse", "lost"]),
    n_tokens=st.none() | counts,
    start=st.none(),
    stop=st.none(),
    reason=st.none() | names,
    error_class=st.none() | names,
)


def printed(drawn: RenderableType, width: int, height: int = 20) -> list[str]:
    """The lines of a frame on a terminal of that size, the last one empty."""
    out = io.StringIO()
    Console(file=out, width=width, height=height, color_system=None, highlight=False, markup=False).print(drawn)
    return out.getvalue().split("\n")


@settings(max_examples=40)
@given(
    st.lists(lines, max_size=40),
    st.lists(happenings, max_size=12),
    st.integers(8, 40),
    st.integers(20, 200),
    st.none() | st.floats(0, 10**6),
    st.none() | names,
)
def test_a_frame_fits_its_terminal(
    sessions: list[SessionLine],
    latest: list[Happening],
    height: int,
    width: int,
    rate: float | None,
    problem: str | None,
) -> None:
    view = View(False, 3, 9, tuple(sessions), tuple(latest))
    shown = printed(frame(view, "x" * 100, height, width, events_per_s=rate, problem=problem), width, height)
    assert len(shown) - 1 <= height
    assert all(cell_len(line) <= width for line in shown)
    assert "q quits" in shown[-2]


@pytest.mark.parametrize("width", [30, 40, 60, 80])
def test_a_name_of_a_session_can_be_read_in_a_narrow_terminal(width: int) -> None:
    line = SessionLine(
        "r", "chat-0012", "live", "decode", 9, 9, 131072, 131072, None, 40, 99999, 1, 9, 85.2, None, False
    )
    shown = printed(frame(View(False, 0, 9, (line,), ()), "log", 20, width, events_per_s=None, problem=None), width)
    [row] = [row for row in shown if row.startswith("chat-0012")]
    assert "131072" in row


def test_names_of_others_do_nothing_to_a_terminal() -> None:
    said = "a\x1b[2Jb\nc\x07"
    line = SessionLine("r", said, "live", "fatal", 1, 0, 0, None, None, 0, 0, 0, 0, None, said, False)
    happening = Happening("r", said, 0, "fatal", None, None, None, said, said)
    view = View(False, 0, 1, (line,), (happening,))
    shown = printed(frame(view, said, 20, events_per_s=None, problem=said), 200)
    assert all(c.isprintable() for row in shown for c in row)
    assert sum(row.count("a?[2Jb?c?") for row in shown) == 6


def test_watching_a_recording(tmp_path: Path) -> None:
    folder = tmp_path / "tapes"
    folder.mkdir()
    recorder = subprocess.Popen(
        [sys.executable, "-m", "support.recording_process", str(folder), "segment", "1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT / "tests",
    )
    assert recorder.stdin is not None
    assert recorder.stdout is not None
    with recorder:
        assert recorder.stdout.readline() == "half\n"
        with Terminal(["-m", "kvtape.cli", "top", folder, "--every", "0.1"], rows=24, columns=80) as terminal:
            seen = terminal.until(lambda text: "q quits" in text)
            assert "recording" in seen
            assert "s1" in seen
            assert "open" in seen
            recorder.stdin.write("\n")
            recorder.stdin.flush()
            terminal.until(lambda text: "closed" in text and "sealed, " in text)
            terminal.press("x")
            terminal.press("q")
            terminal.end()
            assert terminal.raw.startswith("\x1b[?1049h")  # the other screen, and back
            assert "\x1b[?1049l" in terminal.raw
        assert recorder.wait() == 0
    assert json.loads(kvtape("verify", folder, "--json").out)["ok"] is True


def test_ctrl_c_gives_the_terminal_back(log: Path) -> None:
    with Terminal(["-m", "kvtape.cli", "top", log, "--every", "60"], NO_COLOR="1") as terminal:
        terminal.until(lambda text: "q quits" in text)
        assert not terminal.echoes()
        assert "\x1b[31m" not in terminal.raw
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end(130).endswith("kvtape: interrupted\n")
        assert terminal.echoes()
        assert "\x1b[?1049l" in terminal.raw


def test_a_signal_that_ends_it_gives_the_terminal_back(log: Path) -> None:
    with Terminal(["-m", "kvtape.cli", "top", log, "--every", "60"]) as terminal:
        terminal.until(lambda text: "q quits" in text)
        terminal.process.send_signal(signal.SIGTERM)
        terminal.end(128 + signal.SIGTERM)
        assert "\x1b[?1049l" in terminal.raw


@pytest.mark.parametrize("every", ["0", "nan", "inf", "1e300"])
def test_a_time_that_is_none_is_refused(every: str, log: Path) -> None:
    ran = kvtape("top", log, "--every", every)
    assert (ran.code, ran.out) == (2, "")
    assert "'--every'" in ran.err


def test_a_dumb_terminal_gets_one_look(log: Path) -> None:
    with Terminal(["-m", "kvtape.cli", "top", log], TERM="dumb") as terminal:
        assert "main" in terminal.end()
        assert "\x1b" not in terminal.raw
