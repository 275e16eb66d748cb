"""From a picture to a file: SVG as it is, PNG where the extra is installed. What cannot be is said before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.user_files import write_whole

__all__ = ["PNG_ZOOM", "check_plot", "write_picture"]

PNG_ZOOM: Final = 2
"""Pixels of a PNG for each of the SVG: sharp on today's screens."""


def check_plot(path: Path | None) -> None:
    """Raises UsageError for another kind of file or a missing folder, EnvironmentProblem without the extra."""
    if path is None:
        return
    kind = path.suffix.lower()
    if kind not in (".svg", ".png"):
        raise UsageError(f"--plot {path}: a picture is an .svg or a .png; name it so")
    if not path.parent.is_dir():
        raise UsageError(f"--plot {path}: no folder {path.parent}; create it first")
    if path.is_dir():
        raise UsageError(f"--plot {path}: a folder has this name; give the picture another")
    if kind == ".png":
        from importlib.util import find_spec

        from kvtape.cli.errors import missing_extra

        for module in ("resvg_py", "font_roboto"):
            if find_spec(module) is None:
                raise EnvironmentProblem(f"--plot {path}: {missing_extra(module)}, or name an .svg")


def write_picture(path: Path, svg: str) -> None:
    """Write an SVG text, as PNG where the name says so; whole or not at all. Raises as `check_plot`, and OSError."""
    check_plot(path)
    write_whole(path, svg if path.suffix.lower() == ".svg" else _png(svg))


def _png(svg: str) -> bytes:
    """Light, with a font that comes along: the same bytes whatever fonts the machine has."""
    from font_roboto import Roboto
    from resvg_py import svg_to_bytes

    drawn: bytes = svg_to_bytes(
        svg_string=svg,
        zoom=PNG_ZOOM,
        skip_system_fonts=True,
        font_files=[Roboto],
        font_family="Roboto",
        sans_serif_family="Roboto",
    )
    return bytes(drawn)
