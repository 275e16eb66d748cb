"""Progress of long work: a bar with rate and time left on a terminal, plain lines elsewhere, never on stdout."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UsageError
from kvtape.cli.progress import progress, style
from kvtape.cli.progress_lines import Lines
from support.command import kvtape
from support.terminal import Terminal

SECOND = 10**9


def test_how_it_is_shown() -> None:
    assert style({}, terminal=True) == "bar"
    assert style({"TERM": "xterm"}, terminal=True) == "bar"
    assert style({"TERM": "dumb"}, terminal=True) == "lines"
    assert style({}, terminal=False) == "lines"
    assert style({"KVTAPE_PROGRESS": "none"}, terminal=True) == "none"
    assert style({"KVTAPE_PROGRESS": "bar"}, terminal=False) == "bar"
    with pytest.raises(UsageError, match="set it to bar, lines or none"):
        style({"KVTAPE_PROGRESS": "loud"}, terminal=True)


def test_lines_come_after_five_seconds_and_then_every_ten() -> None:
    out = io.StringIO()
    lines = Lines("replaying", out, ManualClock(step_ns=SECOND))
    for done in range(30):
        lines.update(done, 60, "main")
    said = out.getvalue().splitlines()
    assert said == [
        "kvtape: replaying main: 4 of 60 (6 %), 1/s, 0:56 left",
        "kvtape: replaying main: 14 of 60 (23 %), 1/s, 0:46 left",
        "kvtape: replaying main: 24 of 60 (40 %), 1/s, 0:36 left",
    ]


def test_another_count_has_a_rate_of_its_own() -> None:
    out = io.StringIO()
    lines = Lines("replaying", out, ManualClock(step_ns=SECOND))
    for done in range(0, 4000, 1000):
        lines.update(done, 4000, "a")
    for done in range(4):
        lines.update(done, 7300, "b")
    assert out.getvalue() == "kvtape: replaying b: 0 of 7300 (0 %)\n"
    for done in range(4, 12):
        lines.update(done, 7300, "b")
    assert out.getvalue().splitlines()[-1] == "kvtape: replaying b: 10 of 7300 (0 %), 1/s, 2:01:30 left"


def test_a_count_that_begins_anew_has_a_rate_of_its_own() -> None:
    out = io.StringIO()
    lines = Lines("replaying", out, ManualClock(step_ns=SECOND))
    for done in (1000, 2000, 3000, 0, 1, 2, 3):
        lines.update(done, 4000, "again")
    assert out.getvalue() == "kvtape: replaying again: 1 of 4000 (0 %), 1/s, 1:06:39 left\n"


def test_a_total_that_nobody_knows_has_a_rate_and_no_end() -> None:
    out = io.StringIO()
    lines = Lines("importing", out, ManualClock(step_ns=SECOND))
    for done in range(6):
        lines.update(10 * done, 0)
    assert out.getvalue() == "kvtape: importing: 40, 10/s\n"


@pytest.mark.parametrize("verb", ["verify", "merge", "redact", "repair", "export", "calibrate", "import"])
def test_work_on_logs_tells_how_far_it_is(
    verb: str, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int, str]] = []

    class Heard:
        def __init__(self, *_: object) -> None:
            pass

        def update(self, done: int, total: int, what: str = "") -> None:
            told.append((done, total, what))

    monkeypatch.setenv("KVTAPE_PROGRESS", "lines")
    monkeypatch.setattr("kvtape.cli.progress.Lines", Heard)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        "".join(f'{{"timestamp": {n}, "input_length": 9, "output_length": 2, "hash_ids": [{n}]}}\n' for n in range(50))
    )
    args = {
        "verify": ("verify", log),
        "merge": ("merge", log, "--out", tmp_path / "merged.duckdb"),
        "redact": ("redact", log, "--out", tmp_path / "redacted.duckdb"),
        "repair": ("repair", log, "--out", tmp_path / "repaired.duckdb"),
        "export": ("export", log, "--format", "jsonl", "--out", tmp_path / "log.jsonl"),
        "calibrate": ("calibrate", log),
        "import": ("import", trace, "--log", tmp_path / "imported.duckdb"),
    }[verb]
    ran = kvtape(*args)
    assert ran.code == 0, ran.err
    assert all(done <= total for done, total, _ in told)
    if verb == "import":
        assert (trace.stat().st_size, trace.stat().st_size, "bytes of trace.jsonl") in told
        assert any(what == "rows to write" and total == 50 for _, total, what in told)
    else:
        assert told[-1][0] == told[-1][1] > 0


def test_a_bar_has_count_rate_and_time_left() -> None:
    code = (
        "import time\n"
        "from kvtape.cli.progress import progress\n"
        "with progress('counting') as shown:\n"
        "    for n in range(12):\n"
        "        shown.update(n, 40, 'all [of] it')\n"
        "        time.sleep(0.1)\n"
    )
    with Terminal(["-c", code], rows=24, columns=100) as terminal:
        seen = terminal.until(lambda text: "/s" in text and "left 0:00:0" in text)
        assert "counting all [of] it" in seen
        assert "/40" in seen
        terminal.end()
    with Terminal(["-c", code], NO_COLOR="1") as terminal:
        assert "counting" in terminal.end()
        assert "\x1b[3" not in terminal.raw  # no colour, though the cursor moves
    with Terminal(["-c", code], TERM="dumb") as terminal:
        assert terminal.end() == ""  # over before the first line is due
        assert "\x1b" not in terminal.raw


def test_nothing_is_shown_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert os.environ["KVTAPE_PROGRESS"] == "none"
    with progress("quiet") as shown:
        shown.update(1, 2)
    monkeypatch.setenv("KVTAPE_PROGRESS", "bar")
    with progress("loud") as shown:
        shown.update(1, 2)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "quiet" not in printed.err
