"""An error that a user meets says what to do about it: read off the text of every place that raises one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from support.repository import ROOT, room_files

USER_ERRORS = {
    "BadBudget",
    "CapacityError",
    "CostsError",
    "CurveError",
    "EnvironmentProblem",
    "KeyMismatch",
    "LogExists",
    "LogLocked",
    "LogMissing",
    "LogTooNew",
    "LogUnreadable",
    "LogWriteFailed",
    "ModelFileError",
    "ModelUnsupported",
    "NoSuchRow",
    "NotALog",
    "SimulationError",
    "SpecError",
    "SqlRejected",
    "TraceError",
    "UsageError",
    "WorkloadError",
}
"""What reaches people who run a command. InputRejected is left out: in the backends it tells code of a bad argument."""

REMEDY = re.compile(
    r"""(; | \b(allowed|ask|at\ least|at\ most|begin|belongs|choose|create|did\ you\ mean|export|first|give|given|
    go\ with|goes\ with|has|have|holds|instead|install|is\ for|are\ for|leave|like|lower|make|merge|move|must|needs?|
    name|one\ of|only|or|pip|put|raise|reads|remove|run|say|says|see|send|set|take|takes|tell|try|use|want|wants|write|
    as\ in|between|expected)\b)""",
    re.VERBOSE,
)
"""A clause behind a semicolon, or a word that tells what would do."""

OTHERS_TELL = {
    ("backends/llama/native.py", "the model was closed"),
    ("backends/modelled/backend.py", "{} is no capability"),
    ("replay/story.py", "session {} ({}) was imported, and its source tells how many tokens were computed, not which"),
    ("sim/whatif/conditions.py", "condition {}: {}"),
    ("testing/toy.py", "{} is no capability"),
}
"""Beginnings of messages that hand on another's remedy, tell the author of code, or name what cannot be helped."""


def text_of(node: ast.expr) -> str:
    """A message with `{}` for what is filled in; empty for one that is made elsewhere."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.BinOp):
        parts = [text_of(node.left), text_of(node.right)]
        return "".join(part or "{}" for part in parts) if any(parts) else ""
    return ""


def messages(source: str) -> Iterator[str]:
    """Of every place that raises an error of a user; those that only hand on what was told elsewhere are left out."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)):
            continue
        text = text_of(node.exc.args[0]) if node.exc.func.id in USER_ERRORS and node.exc.args else ""
        if re.search("[a-z]", text):
            yield text


def test_every_error_of_a_user_has_a_remedy() -> None:
    raised = [(name, text) for name in room_files() for text in messages((ROOT / name).read_text(encoding="utf-8"))]
    assert len(raised) > 400
    without = {(name, text) for name, text in raised if not REMEDY.search(text)}
    excused = {
        (name, text)
        for name, text in without
        for where, begin in OTHERS_TELL
        if (name, text[: len(begin)]) == (where, begin)
    }
    assert without - excused == set(), "say behind a semicolon what to do"
    assert len(excused) >= len(OTHERS_TELL), "one is no longer there: take it off the list"


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ('raise UsageError(f"{x}: bad")', ["{}: bad"]),
        ('raise SpecError("a" f"{b}; give c") from None', ["a{}; give c"]),
        ("raise UsageError(str(err))", []),
        ('raise ValueError("x")', []),
        ('raise UsageError("a" + y)', ["a{}"]),
    ],
)
def test_messages_are_read_as_they_are_raised(code: str, found: list[str]) -> None:
    assert list(messages(code)) == found
    assert [bool(REMEDY.search(text)) for text in found] == ["give" in text for text in found]
