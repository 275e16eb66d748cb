"""The page's colours: read against what is behind them, and told apart, whatever eyes look at them."""

from __future__ import annotations

import re

import pytest

from support.contrast import alike, contrast, rgb
from support.repository import ROOT

STATES = ("resident", "recent", "sink", "cold", "dropped")
CSS = (ROOT / "report/assets/report.css").read_text(encoding="utf-8")


def themes() -> dict[str, dict[str, tuple[int, int, int]]]:
    """Colours by name: chosen dark and the system's dark are written twice, print is a theme of its own."""
    blocks = re.findall(r"(:root[^{]*)\{([^}]*--paper[^}]*)\}", CSS)
    assert len(blocks) == 4
    names = ("light", "dark", "system dark", "print")
    return {
        name: {key: rgb(value) for key, value in re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})\b", body)}
        for name, (_, body) in zip(names, blocks, strict=True)
    }


THEMES = themes()


def test_dark_by_choice_is_dark_by_system() -> None:
    assert THEMES["dark"] == THEMES["system dark"]
    assert THEMES["print"].keys() == THEMES["light"].keys() == THEMES["dark"].keys()


@pytest.mark.parametrize("theme", THEMES)
def test_text_is_read_and_marks_are_seen(theme: str) -> None:
    colours = THEMES[theme]
    for ground in ("paper", "raised"):
        for ink in ("ink", "faint", "accent"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, f"{ink} on {ground}"
    assert contrast(colours["warn-ink"], colours["warn-paper"]) >= 4.5
    for mark in (*STATES, *(f"s{i}" for i in range(8))):
        assert contrast(colours[mark], colours["paper"]) >= 3, mark


@pytest.mark.parametrize("theme", THEMES)
def test_states_and_series_are_told_apart(theme: str) -> None:
    colours = THEMES[theme]
    assert alike({state: colours[state] for state in STATES}, 20) == []
    assert alike({f"s{i}": colours[f"s{i}"] for i in range(8)}, 12) == []


def test_the_measures_are_the_known_ones() -> None:
    assert contrast(rgb("#000"), rgb("#fff")) == pytest.approx(21)
    assert contrast(rgb("#767676"), rgb("#ffffff")) == pytest.approx(4.54, abs=0.005)
    # Red and green of one lightness: far apart, and one colour to a deuteranope.
    found = alike({"red": rgb("#b35a2d"), "green": rgb("#7a7a1f")}, 12)
    assert [line for line in found if "normal" in line] == []
    assert [line for line in found if "deutan" in line]
