"""Bytes against context: what the engine allocates, what attention needs, and where windows stop growing."""

from __future__ import annotations

from collections.abc import Iterator

from kvtape.capacity.answer import Answer
from kvtape.capacity.sizes import size_text
from kvtape.cli.plots.canvas import Anchor, document, line, polyline, text
from kvtape.cli.plots.frame import Axis, Frame, even_axis
from kvtape.cli.plots.legend import Entry, legend

__all__ = ["capacity_picture"]

_LEFT, _TOP, _WIDTH, _HEIGHT, _BELOW, _RIGHT = 104, 88, 580, 310, 56, 40
_POINTS = 240
_UNITS = ((30, "GiB"), (20, "MiB"), (10, "KiB"), (0, "bytes"))


def capacity_picture(found: Answer) -> str:
    """As SVG, over [0, the largest of trained and asked context]."""
    n_max = max(found.context.model_max, found.context.request or 0, 1)
    knees = sorted({g.window for g in found.geometry.groups if g.is_windowed and g.count and g.window < n_max})
    contexts = sorted({1, *knees, *(max(1, n_max * i // _POINTS) for i in range(1, _POINTS + 1))})
    power, up = _bytes_axis(max(found.sizing.total_bytes(n_max), found.geometry.bytes(n_max), 1))
    frame = Frame(_LEFT, _TOP, _WIDTH, _HEIGHT, even_axis("context, tokens", n_max), up)
    asked = found.question
    title = f"KV cache of {asked.model.arch}, {asked.type_k}/{asked.type_v}, {found.rule.name}"
    entries = [Entry("allocated by the engine", "s0"), Entry("ideal, one sequence", "s3", dash="7 3")]
    parts = [
        text(_LEFT, 24, title),
        *legend(_LEFT, 34, entries),
        *frame.parts(),
        polyline(frame.at((n, found.sizing.total_bytes(n) / power) for n in contexts), "s0"),
        polyline(frame.at((n, found.geometry.bytes(n) / power) for n in contexts), "s3", dash="7 3"),
    ]
    for n in knees:
        parts += _mark(frame, n, f"window of {n} full", 0, "faint", "2 3")
    parts += _outcome(found, frame, power)
    return document(frame.right + _RIGHT, frame.bottom + _BELOW, title, parts)


def _bytes_axis(most: int) -> tuple[int, Axis]:
    """Bytes of the unit, and the axis in it."""
    bits, unit = next((bits, unit) for bits, unit in _UNITS if most >= 1 << bits)
    return 1 << bits, even_axis(f"KV cache, {unit}", most / (1 << bits))


def _outcome(found: Answer, frame: Frame, power: int) -> Iterator[str]:
    """What is served, and the memory that bounds it where it is in the picture."""
    served, memory = int(found.context.effective), found.question.memory
    if served:
        yield from _mark(frame, served, f"served: {served}", 1, "ink")
    if memory is not None and memory.for_cache / power <= frame.up.high:
        at = frame.y(memory.for_cache / power)
        yield line(frame.left, at, frame.right, at, "cold", width=1.5, dash="7 3")
        yield text(frame.right, at - 5, f"memory for the cache: {size_text(memory.for_cache)}", "end")


def _mark(frame: Frame, context: int, said: str, line_of_text: int, colour: str, dash: str = "") -> Iterator[str]:
    """A line at a context; its text where the curves, which rise, are not: low on the right, high on the left."""
    at = frame.x(context)
    right = at > frame.left + frame.width / 2
    anchor: Anchor
    anchor, shift = ("end", -4) if right else ("start", 4)
    y = frame.bottom - 10 - 18 * line_of_text if right else frame.top + 14 + 18 * line_of_text
    yield line(at, frame.top, at, frame.bottom, colour, dash=dash)
    yield text(at + shift, y, said, anchor)
