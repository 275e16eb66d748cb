"""`kvtape report`: one file that needs nothing, the same bytes each time, and errors that leave nothing behind."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import zlib
from base64 import b64decode
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvtape.report.page import PageMeta, page
from kvtape.report.panel import Figure, Missing, Panel, Table
from kvtape.report.sources import choose
from kvtape.traces.folder import new_segment
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.command import kvtape
from support.logs import KEY, TickClock, record_script, run_row, script, write_log

HOSTILE = ("</script><img src=x onerror=alert(1)>", "' onmouseover='x", "<!--<script>")


class Tags(HTMLParser):
    """Elements of a page with their attributes, and the text of scripts."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def report(log: Path, out: Path, *more: str) -> str:
    done = kvtape("report", str(log), "--out", str(out), *more)
    assert done.code == 0, done.err
    return out.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "a.duckdb", [script(), script("s1")])


def test_a_report_made_again_has_the_same_bytes(log: Path, tmp_path: Path) -> None:
    first = report(log, tmp_path / "one.html")
    assert first == report(log, tmp_path / "two.html")
    assert len(first.encode()) < 200_000
    said = json.loads(kvtape("report", log, "--out", tmp_path / "one.html", "--json").out)
    assert said["digest"] == hashlib.sha256((tmp_path / "one.html").read_bytes()).hexdigest()
    assert said["bytes"] == len(first.encode())


@pytest.mark.parametrize("asked", [(), ("r0", "r1", "--session", "s 1")])
def test_the_page_has_the_command_that_makes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("logs").mkdir()
    for run in ("r0", "r1"):
        recorder = Recorder(new_segment(Path("logs")), run_row(run), clock=TickClock(), key=KEY)
        for session in ("s0", "s 1"):
            record_script(recorder, script(session, run))
        recorder.seal()
    first = report(Path("logs"), Path("first.html"), *asked)
    (command,) = re.findall("kvtape report [^<]*", first)
    again = kvtape(*shlex.split(unescape(command))[1:])
    assert again.code == 0, again.err
    assert Path("report.html").read_text(encoding="utf-8") == first


def test_the_page_loads_nothing_and_every_id_is_its_own(log: Path, tmp_path: Path) -> None:
    found = Tags(report(log, tmp_path / "r.html")).found
    links = [a.get(name) for _, a in found for name in ("src", "href", "action", "data") if name in a]
    assert all(link is not None and link.startswith(("#", "data:")) for link in links), links
    ids = [a["id"] for _, a in found if "id" in a]
    assert len(set(ids)) == len(ids)
    assert {"sessions", "events-0", "states-1"} <= set(ids)
    for tag, a in found:
        for name in ("aria-labelledby", "aria-describedby", "for"):
            assert name not in a or a[name] in ids, (tag, a)


def test_texts_of_the_log_are_only_texts(tmp_path: Path) -> None:
    path = write_log(tmp_path / "h.duckdb", [script(name) for name in HOSTILE])
    html = report(path, tmp_path / "r.html")
    plain = report(write_log(tmp_path / "p.duckdb", [script(n) for n in ("s0", "s1", "s2")]), tmp_path / "p.html")

    def shape(text: str) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(sorted(a))) for tag, a in Tags(text).found]

    assert shape(html) == shape(plain)
    assert "<img" not in html


def test_only_the_sessions_and_runs_that_are_asked_for(log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.duckdb"
    recorder = Recorder(other, run_row("r1", kind="simulation"), clock=TickClock(), key=KEY, max_latency_s=0)
    record_script(recorder, script("s0", "r1"))
    recorder.seal()
    assert kvtape("merge", log, other, "--out", tmp_path / "both.duckdb").code == 0
    with open_log(tmp_path / "both.duckdb") as both:
        assert [view.label for view in choose(both).views] == ["s0", "s1"]
        assert [view.label for view in choose(both, ["r1"]).views] == ["s0"]
        assert [view.label for view in choose(both, ["r1", "r0"], ["s0"]).views] == ["r1 / s0", "r0 / s0"]
        assert [run.run_id for run in choose(both).runs] == ["r0", "r1"]


def test_errors_are_one_line_and_leave_no_file(log: Path, tmp_path: Path) -> None:
    out = tmp_path / "r.html"
    cases = [
        ((str(tmp_path / "none.duckdb"),), 2, "no such log"),
        ((str(log), "elsewhere"), 2, "no run 'elsewhere'; the log has r0"),
        ((str(log), "--session", "s9"), 2, "no session 's9'; there is s0, s1"),
    ]
    for args, code, said in cases:
        done = kvtape("report", *args, "--out", str(out))
        assert done.code == code, args
        assert said in done.err
        assert len(done.err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
    for place in (tmp_path, tmp_path / "no" / "r.html", "-"):
        done = kvtape("report", str(log), "--out", str(place))
        assert (done.code, len(done.err.splitlines())) == (2, 1)
        assert str(place) in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_page_refuses_two_parts_with_one_id() -> None:
    panel = Panel("a", "A", "lead", missing=(Missing("nothing", "kvtape record"),))
    with pytest.raises(ValueError, match="used more than once as an id: a"):
        page([panel, panel], PageMeta("t", "l"))
    with pytest.raises(ValueError, match="nothing said of why"):
        Panel("b", "B", "lead")


def test_what_is_missing_is_said_with_its_command() -> None:
    table = Table("t <1>", ("name", "n (tokens)", "share"), [("a&b", 12345, None), ("", 1, 0.5)], left_out=3)
    figure = Figure("f", "F", "chart", "what it shows", {"x": "</script>"}, table)
    shown = Panel("a", "A", "lead", (figure,), (table,), (Missing("no <replay>", "kvtape replay L"),))
    html = page([shown], PageMeta("T", "L"))
    assert "no &lt;replay&gt;" in html
    assert "<code>kvtape replay L</code>" in html
    assert '<td class="number">12,345</td>' in html
    assert '<td class="number unknown">unknown</td>' in html
    assert "3 more rows are left out" in html
    assert html.count("</script>") == len(re.findall(r"<script\b", html))


def test_packed_columns_are_deflated_text(log: Path, tmp_path: Path) -> None:
    html = report(log, tmp_path / "r.html")
    (packed,) = re.findall(r'<script type="text/plain" id="events-0">([^<]*)</script>', html)
    assert zlib.decompress(b64decode(packed))
