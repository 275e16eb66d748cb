"""What marks of a picture stand for, on figures made by hand: cases that a small log does not have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtape.cli.plots.canvas import document, text
from kvtape.cli.plots.residency import residency_picture
from kvtape.cli.plots.tradeoffs import tradeoff_picture
from kvtape.traces.reader import open_log
from support.logs import write_log
from support.read_svg import Drawn, Picture, read_svg
from support.scripted import Script

SERVED: dict[str, Any] = {
    "policy": "stream:sink=4",
    "budget": 64,
    "retained_mass": None,
    "ttft_p95_ns": 2e9,
    "tpot_p95_ns": 3e6,
    "peak_kv_bytes": 2**20,
    "clairvoyant": False,
    "not_served": 0,
    "pareto": True,
    "error": None,
    "intervals": None,
}


def pictured(*rows: dict[str, Any], hypothetical: bool = False) -> Picture:
    return read_svg(tradeoff_picture({"rows": [SERVED | row for row in rows], "hypothetical": hypothetical}))


def points(picture: Picture, tag: str) -> list[Drawn]:
    """Without the marks of the key, which stand right of both plots."""
    key = picture.key("beside a point: its budget, tokens").number("x")
    found = picture.of(tag)
    return [s for s in found if float(s.attributes.get("cx") or s.points[0][0]) < key]


def test_a_clairvoyant_point_is_a_diamond() -> None:
    picture = pictured({}, {"policy": "opt", "clairvoyant": True})
    assert (len(points(picture, "circle")), len(points(picture, "polygon"))) == (2, 2)  # one in each plot
    assert picture.key("diamond: knows the future").tag == "polygon"
    assert "diamond: knows the future" not in pictured({}).texts


def test_a_point_that_serves_not_every_turn_is_struck_through() -> None:
    picture = pictured({}, {"policy": "none", "not_served": 2, "peak_kv_bytes": 2**19})
    through = [s for s in picture.of("path", "line-faint") if s.attributes.get("stroke-width") == "1.5"]
    (struck,) = {(s.number("cx"), s.number("cy")) for s in points(picture, "circle")[1:2]}
    x, y = (float(part) for part in through[0].attributes["d"][1:].split("L")[0].split())
    assert len(through) == 2
    assert (x + 7, y - 7) == pytest.approx(struck)
    assert "struck through: turns are not served" in picture.texts
    assert "struck through: turns are not served" not in pictured({}).texts


def test_points_without_a_figure_are_counted() -> None:
    picture = pictured({}, {"ttft_p95_ns": None}, {"error": "no room", "ttft_p95_ns": None, "tpot_p95_ns": None})
    said = [t for t in picture.texts if t.startswith("not drawn")]
    assert said == [f"not drawn: {n} of 3, without this figure" for n in (2, 1)]
    assert len(points(picture, "circle")) == 3


def test_costs_that_nobody_measured_are_named() -> None:
    assert "HYPOTHETICAL" in pictured({}, hypothetical=True).title
    assert "HYPOTHETICAL" not in pictured({}).title


def test_a_name_that_no_xml_can_hold_is_written_all_the_same() -> None:
    name, shown = (
        "a\x00b\x1b<c>&\n",
        "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}<c>&\N{REPLACEMENT CHARACTER}",
    )
    picture = read_svg(document(10, 10, name, [text(0, 0, name)]))
    assert (picture.title, picture.texts) == (shown, [shown])


def test_a_sink_thinner_than_a_pixel_is_seen_over_the_rest(tmp_path: Path) -> None:
    long = Script(n_ctx=8192)
    long.prefill([1] * 4000)
    with open_log(write_log(tmp_path / "l.duckdb", [long])) as tape:
        (row,) = tape.sessions(tape.default_run().run_id)
        picture = read_svg(residency_picture(tape, replace(row, policy="stream:sink=4,recent=60")))
    areas = [s for s in picture.of("rect")[:-5] if s.classes != ("fill-paper",)]  # the last five are those of the key
    assert [s.classes for s in areas] == [("fill-resident",), ("fill-recent",), ("fill-sink",)]
    assert areas[-1].number("height") == 1
    assert areas[-1].number("y") + 1 == pytest.approx(areas[0].number("y") + areas[0].number("height"), abs=0.5)
