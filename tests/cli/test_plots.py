"""`--plot`: pictures that say what the numbers say, read back by their own axes and keys."""

from __future__ import annotations

import json
import struct
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvtape.cli.plots import palette, residency
from kvtape.cli.plots.canvas import document, width_of
from kvtape.cli.plots.frame import Frame, even_axis, log_axis
from kvtape.cli.plots.legend import series_look
from kvtape.planner.residency import apply
from kvtape.planner.residency_state import ResidencyState
from kvtape.report.data.history import RESIDENT, STATES
from kvtape.traces.reader import open_log
from support.command import kvtape, kvtape_process
from support.imports import written
from support.read_svg import Drawn, Picture, read_svg
from support.repository import ROOT

PAINTED = STATES[RESIDENT:]

ROWS = "".join(
    f'{{"timestamp": {t}, "input_length": {512 * len(ids)}, "output_length": 1, "hash_ids": {ids}}}\n'
    for t, ids in enumerate([[1, 2], [1, 2, 3], [4], [1, 2], [4, 5], [1, 2, 3]] * 3)
)


@pytest.fixture(scope="module")
def costs(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    assert kvtape("calibrate", log, "--out", path, "--plot", path.with_suffix(".svg")).code == 0
    return path


def drawn(tmp_path: Path, verb: str, *args: object) -> tuple[Any, Picture]:
    """What the command prints as JSON, and its picture."""
    path = tmp_path / "plot.svg"
    ran = kvtape(verb, *args, "--plot", path, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out), read_svg(path.read_text(encoding="utf-8"))


def folded(log: Path, sink: int, recent: int) -> np.ndarray:
    """The state of every tape position (rows) after every event (columns) as a word, from the fold alone."""
    states, state = [], ResidencyState()
    with open_log(log) as tape:
        for event in tape.events(tape.default_run().run_id, "main"):
            state = apply(state, event)
            states.append(state)
    grid = np.full((max(s.tape_length for s in states), len(states)), "", dtype=object)
    for column, s in enumerate(states):
        for position in range(s.tape_length):
            if position in s.resident:
                newest = position >= s.tape_length - recent
                grid[position, column] = "sink" if position < sink else "recent" if newest else "resident"
            else:
                grid[position, column] = "cold" if position in s.cold_ranges else "dropped"
    return grid


def painted(picture: Picture, shape: tuple[int, int], every: int = 1, grain: int = 1) -> np.ndarray:
    """The colour's name that is seen at the lower left of each cell of so many events and positions."""
    x, y = picture.across("event (seq)"), picture.up("tape position, tokens")
    grid = np.full(shape, "", dtype=object)
    areas = [s for s in picture.of("rect") if s.classes[0].removeprefix("fill-") in PAINTED]
    for area in areas[:-5] if len(areas) > 5 else areas:  # the last five are those of the key
        left, top = area.number("x"), area.number("y")
        since, until = round(x(left)), round(x(left + area.number("width")))
        start, stop = round(y(top + area.number("height"))), round(y(top))
        grid[start : max(stop, start + 1), since:until] = area.classes[0].removeprefix("fill-")
    return grid[::grain, ::every]


def test_the_residency_map_is_the_fold(log: Path, tmp_path: Path) -> None:
    body, picture = drawn(tmp_path, "show", log, "--at", 9)
    expected = folded(log, 4, 60)
    assert {"resident", "recent", "sink", "cold", "dropped"} <= set(expected.flat)
    assert (painted(picture, expected.shape) == expected).all()
    assert picture.title == "What was resident: session main, stream:sink=4,recent=60"
    assert "every event, every position" in picture.texts
    assert picture.key("resident: recent").classes == ("fill-recent",)
    mark = picture.key("event 9")
    (at,) = [s for s in picture.of("path", "line-ink") if s.attributes["d"] != mark.attributes["d"]]
    assert picture.across("event (seq)")(float(at.attributes["d"].split()[0][1:])) == pytest.approx(10, abs=0.05)
    assert body["sessions"][0]["seq"] == 9


def test_of_a_long_session_some_events_are_drawn_and_it_says_so(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = folded(log, 4, 60)
    for name, value in (("_MOST_AREAS", 10), ("_COLUMNS", 12), ("_ROWS", 40)):
        monkeypatch.setattr(residency, name, value)
    _, picture = drawn(tmp_path, "show", log)
    every, grain = -(-expected.shape[1] // 12), -(-expected.shape[0] // 40)
    assert min(every, grain) > 1
    assert f"drawn: one event of {every}, one position of {grain}" in picture.texts
    assert (painted(picture, expected.shape, every, grain) == expected[::grain, ::every]).all()


def test_the_curve_has_the_rows_and_the_ceiling(tmp_path: Path) -> None:
    trace = written(tmp_path, ROWS, "trace.jsonl")
    body, picture = drawn(tmp_path, "curve", trace)
    x = picture.across("budget, blocks of 512 tokens (logarithmic)", logarithmic=True)
    y = picture.up("hit rate, % of tokens")
    for line, policy in zip(picture.of("polyline"), ("fifo", "lru", "opt (knows the future)"), strict=True):
        mark = picture.key(policy)
        assert mark.classes == line.classes
        assert mark.attributes.get("stroke-dasharray") == line.attributes.get("stroke-dasharray")
        rows = [row for row in body["rows"] if row["policy"] == policy.split()[0]]
        assert [(x(a), y(b) / 100) for a, b in line.points] == [
            pytest.approx((row["budget_blocks"], row["hit_rate"]), rel=0.01, abs=2e-3) for row in rows
        ]
    dashed = {s.attributes["d"] for s in picture.of("path", "line-faint") if "stroke-dasharray" in s.attributes}
    heights = {float(d.split()[1].split("L")[0]) for d in dashed}
    assert any(y(height) / 100 == pytest.approx(body["ceiling"], abs=2e-3) for height in heights)


def test_a_what_if_has_its_points(log: Path, costs: Path, tmp_path: Path) -> None:
    points = ("--policy", "none", "--policy", "stream", "--policy", "class", "--budget", 128, "--budget", 200)
    body, picture = drawn(tmp_path, "whatif", log, "--costs", costs, *points)
    rows = [row for row in body["rows"] if row["ttft_p95_ns"] is not None and row["peak_kv_bytes"] is not None]
    assert len(rows) < len(body["rows"]) or len(rows) == 6
    labels = ("time to first token, 95th percentile, s", "time per output token, 95th percentile, ms")
    y = picture.up("KV cache at its peak, MiB")
    marks = [s for s in picture.of("circle") if s.attributes["r"] == "5"]
    for panel, (label, name, unit) in enumerate(zip(labels, ("ttft_p95_ns", "tpot_p95_ns"), (1e9, 1e6), strict=True)):
        x = picture.across(label, within=200)
        there = [row for row in rows if row[name] is not None]
        mine, marks = marks[: len(there)], marks[len(there) :]
        for row, mark in zip(there, mine, strict=True):
            found = x(mark.number("cx")), y(mark.number("cy"))
            assert found == pytest.approx((row[name] / unit, row["peak_kv_bytes"] / 2**20), rel=0.02), (panel, row)
            assert ("fill-paper" not in mark.classes) == row["pareto"]
            family = picture.key(row["policy"].split(":")[0]).classes[0].removeprefix("fill-")
            assert mark.classes[0].partition("-")[2] == family
    said = {part for text in picture.texts for part in text.split(", ")}
    assert {str(row["budget"]) for row in rows} <= said
    beside = [
        s for s in picture.of("text", "fill-faint") if s.attributes["text-anchor"] == "start" and s.text[0].isdigit()
    ]
    assert len(beside) >= 4
    assert not any(overlap(a, b) for a, b in combinations(beside, 2))


def overlap(a: Drawn, b: Drawn) -> bool:
    """Whether two lines of text run into each other."""
    first, second = sorted((a, b), key=lambda s: s.number("x"))
    return abs(a.number("y") - b.number("y")) < 10 and first.number("x") + width_of(first.text) > second.number("x")


def test_numbers_of_turns_do_not_run_into_each_other() -> None:
    columns = SimpleNamespace(turn=np.repeat(np.arange(900, 1100), 5))
    frame = Frame(80, 60, 640, 400, even_axis("event (seq)", 1000), even_axis("tape position, tokens", 10))
    svg = document(800, 500, "turns", residency._turns(columns, frame))  # type: ignore[arg-type]
    marks = read_svg(svg).of("text")
    assert len(marks) > 5
    assert not any(overlap(a, b) for a, b in combinations(marks, 2))


def test_a_folder_is_no_place_for_a_picture(tmp_path: Path) -> None:
    (tmp_path / "map.svg").mkdir()
    ran = kvtape("show", tmp_path / "none.duckdb", "--plot", tmp_path / "map.svg")
    assert ran.code == 2
    assert "a folder has this name" in ran.err


def test_intervals_of_drawn_arrivals_are_bars(log: Path, costs: Path, tmp_path: Path) -> None:
    args = ("--policy", "stream", "--budget", 200, "--seeds", 3)
    body, picture = drawn(tmp_path, "whatif", log, "--costs", costs, *args)
    x = picture.across("time to first token, 95th percentile, s", within=200)
    bar = next(s for s in picture.of("path", "line-s0") if s.attributes["stroke-width"] == "1.5")
    start, stop = (float(part.split()[0]) for part in bar.attributes["d"][1:].split("L"))
    found = body["rows"][0]["intervals"]["ttft_p95_ns"]
    assert (x(start), x(stop)) == pytest.approx((found["low"] / 1e9, found["high"] / 1e9), rel=0.02)


def test_a_calibration_has_every_sample(log: Path, costs: Path) -> None:
    said = json.loads(costs.read_text(encoding="utf-8"))
    fits = [(kind, known["fit"]) for kind, known in said["kinds"].items() if known["fit"]]
    picture = read_svg(costs.with_suffix(".svg").read_text(encoding="utf-8"))
    dots = [s for s in picture.of("circle") if s.attributes["r"] == "2.5"]
    assert len(dots) == sum(len(fit["scatter"]) for _, fit in fits) > 10
    for kind, fit in fits:
        assert any(text.startswith(f"{kind}: {fit['events']} event") for text in picture.texts)
    panel = next(i for i, (kind, _) in enumerate(fits) if kind == "decode")
    before = sum(len(fit["scatter"]) for _, fit in fits[:panel])
    own = [s for s in picture.of("text") if s.text == "modelled, ms"][panel]
    assert own.number("x") > dots[before].number("cx") - 200
    mark = picture.key("model and record agree")
    assert mark.attributes["stroke-dasharray"]
    dashed = [s for s in picture.of("path", *mark.classes) if "stroke-dasharray" in s.attributes and s != mark]
    assert len(dashed) == len(fits)
    for diagonal in dashed:
        (left, low), (right, high) = (
            [float(n) for n in end.split()] for end in diagonal.attributes["d"][1:].split("L")
        )
        assert right - left == pytest.approx(low - high)


def test_pictures_are_the_same_bytes_in_every_process(log: Path, tmp_path: Path) -> None:
    for seed in ("1", "2"):
        ran = kvtape_process(["show", log, "--plot", tmp_path / f"{seed}.png"], PYTHONHASHSEED=seed)
        assert ran.code == 0, ran.err
    assert kvtape("show", log, "--plot", tmp_path / "here.png").code == 0
    assert (
        (tmp_path / "1.png").read_bytes() == (tmp_path / "2.png").read_bytes() == (tmp_path / "here.png").read_bytes()
    )


def test_a_png_has_the_picture_in_light_and_its_words(log: Path, tmp_path: Path) -> None:
    from PIL import Image

    for kind in ("svg", "png"):
        assert kvtape("show", log, "--plot", tmp_path / f"map.{kind}").code == 0
    data = (tmp_path / "map.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    svg = (tmp_path / "map.svg").read_text(encoding="utf-8")
    width, height = (float(svg.partition(f'{name}="')[2].partition('"')[0]) for name in ("width", "height"))
    assert struct.unpack(">II", data[16:24]) == (round(2 * width), round(2 * height))
    pixels = np.asarray(Image.open(tmp_path / "map.png").convert("RGB")).reshape(-1, 3)
    seen = {f"#{colour:06x}" for colour in np.unique(pixels.astype(np.int64) @ (1 << 16, 1 << 8, 1)).tolist()}
    assert {palette.LIGHT[name] for name in ("paper", "ink", *PAINTED)} <= seen
    title = np.asarray(Image.open(tmp_path / "map.png").convert("L"))[20:56, 160:700]
    assert (title < 128).mean() > 0.03  # letters, with whatever fonts this machine has


def test_the_colours_are_those_of_the_report_in_both_themes(log: Path, tmp_path: Path) -> None:
    import re

    sheet = (ROOT / "report/assets/report.css").read_text(encoding="utf-8")
    light, dark = (re.findall(r"(:root[^{]*)\{([^}]*--paper[^}]*)\}", sheet)[i][1] for i in (0, 1))
    for theme, block in ((palette.LIGHT, light), (palette.DARK, dark)):
        said = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})\b", block))
        assert {name: said[name] for name in theme} == theme
    _, picture = drawn(tmp_path, "show", log)
    before, dark_rules = picture.style.split("@media (prefers-color-scheme: dark)")
    for name in ("paper", "ink", "resident"):
        assert f".fill-{name}{{fill:{palette.LIGHT[name]}}}" in before
        assert f".fill-{name}{{fill:{palette.DARK[name]}}}" in dark_rules
    classes = {c for s in picture.shapes for c in s.classes}
    assert all(f".{c}{{" in before for c in classes)
    assert len({series_look(i) for i in range(32)}) == 32


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [("map.pdf", 2, ".svg or a .png"), ("map", 2, ".svg or a .png"), ("none/map.svg", 2, "create it first")],
)
@pytest.mark.parametrize("verb", ["curve", "show", "whatif", "calibrate", "capacity"])
def test_what_cannot_be_written_is_said_before_any_work(
    verb: str, name: str, code: int, words: str, tmp_path: Path
) -> None:
    more = ["--costs", tmp_path / "none.json"] if verb == "whatif" else []
    ran = kvtape(verb, tmp_path / "none.duckdb", *more, "--plot", tmp_path / name)
    assert (ran.code, ran.out) == (code, "")
    assert ran.err.count("\n") == 1
    assert words in ran.err


def test_a_png_without_its_extra_is_refused_with_the_remedy(
    log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    ran = kvtape("show", log, "--plot", tmp_path / "map.png")
    assert ran.code == 3
    assert "kvtape[png]" in ran.err
    assert ".svg" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_map_is_of_one_session_and_of_one_with_a_tape(tmp_path: Path) -> None:
    trace = written(tmp_path, ROWS, "trace.jsonl")
    several = tmp_path / "imported.duckdb"
    assert kvtape("import", trace, "--log", several).code == 0
    ran = kvtape("show", several, "--plot", tmp_path / "map.svg")
    assert ran.code == 2
    assert "--session" in ran.err
    assert not (tmp_path / "map.svg").exists()
    _, picture = drawn(tmp_path, "show", several, "--session", "line-0000001")
    assert any("nothing to draw" in text for text in picture.texts)


@pytest.mark.parametrize(
    ("high", "last"), [(1.0, 1.0), (0.73, 0.8), (4340, 5000), (153, 160), (0.0, 1.0), (1e-6, 1e-6)]
)
def test_even_axes_end_at_a_round_number(high: float, last: float) -> None:
    axis = even_axis("x", high, most=10 if high == 153 else 6)
    assert axis.high == pytest.approx(last)
    assert axis.marks[0][0] == 0
    assert axis.marks[-1][0] == pytest.approx(axis.high)
    assert len(axis.marks) <= 12


def test_logarithmic_axes_hold_their_values() -> None:
    axis = log_axis("x", 3, 700)
    assert (axis.low, axis.high) == (1, 1000)
    assert [said for _, said in axis.marks] == ["1", "10", "100", "1,000"]
    assert axis.share(10) == pytest.approx(1 / 3)
    assert log_axis("x", 8, 8, 2).high == 16
