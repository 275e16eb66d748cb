"""On a terminal: tables with rules, colours only where they are wanted, the result alone on stdout."""

from __future__ import annotations

import json
from pathlib import Path

from support.terminal import Terminal


def on_terminal(*args: object, columns: int = 80, **environment: str) -> str:
    """What a terminal of that width shows of stdout; stderr is left out."""
    with Terminal(["-m", "kvtape.cli", *args], columns=columns, quiet=True, **environment) as terminal:
        terminal.end()
        return terminal.raw.replace("\r\n", "\n")


def test_a_table_has_rules_and_fits_the_width(log: Path) -> None:
    shown = on_terminal("sql", log, "SELECT seq, op, resident_digest, layout_digest FROM events LIMIT 3", columns=60)
    assert "──" in shown
    plain = [line for line in shown.splitlines() if "digest" not in line]
    assert max(len(line) for line in plain) <= 80  # escape codes of the bold head count here, too


def test_no_color_means_no_escape_codes(log: Path) -> None:
    assert "\x1b[" not in on_terminal("show", log, NO_COLOR="1")
    assert "\x1b[" in on_terminal("show", log)


def test_json_on_a_terminal_is_json_for_eyes(log: Path) -> None:
    shown = on_terminal("verify", log, "--json")
    assert json.loads(shown)["ok"] is True
    assert shown.count("\n") > 5
