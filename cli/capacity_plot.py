"""Bytes against context as an SVG: what the engine allocates, what attention needs, and where windows stop growing.

Hand-written, so that one answer is one sequence of bytes on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from kvtape.capacity.answer import Answer
from kvtape.capacity.sizes import size_text
from kvtape.cli.svg import svg, svg_text

__all__ = ["capacity_svg"]

_WIDTH, _HEIGHT = 720, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 96, 24, 56, 64
_ALLOCATED, _IDEAL = "#1f5fa8", "#c2571a"
_POINTS: Final = 240
_TICKS: Final = 4


class _Frame:
    """From tokens and bytes to the picture's coordinates."""

    def __init__(self, n_max: int, b_max: int) -> None:
        self.n_max = n_max
        self.b_max = b_max

    def x(self, n: int) -> float:
        return _LEFT + n / self.n_max * (_WIDTH - _LEFT - _RIGHT)

    def y(self, b: int) -> float:
        return _HEIGHT - _BOTTOM - b / self.b_max * (_HEIGHT - _TOP - _BOTTOM)

    def curve(self, contexts: Iterable[int], size: Callable[[int], int], colour: str, dash: str = "") -> str:
        path = " ".join(f"{self.x(n):.2f},{self.y(size(n)):.2f}" for n in contexts)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        return f'<polyline points="{path}" stroke="{colour}" stroke-width="2"{dashes}/>'


def capacity_svg(found: Answer) -> str:
    """A plot over [0, the largest of trained and asked context], which ends in a newline."""
    n_max = max(found.context.model_max, found.context.request or 0, 1)
    knees = sorted({g.window for g in found.geometry.groups if g.is_windowed and g.count and g.window < n_max})
    contexts = sorted({1, *knees, *(max(1, n_max * i // _POINTS) for i in range(1, _POINTS + 1))})
    frame = _Frame(n_max, max(found.sizing.total_bytes(n_max), found.geometry.bytes(n_max), 1))
    parts = [
        *_axes(frame),
        *_legend(found),
        frame.curve(contexts, found.sizing.total_bytes, _ALLOCATED),
        frame.curve(contexts, found.geometry.bytes, _IDEAL, "5 4"),
        *(_mark(frame.x(n), f"window of {n} full", 12, "#888", ' stroke-dasharray="3 3"') for n in knees),
        *_outcome(found, frame),
    ]
    return svg(_WIDTH, _HEIGHT, parts, fill="none")


def _axes(frame: _Frame) -> Iterable[str]:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" stroke="#444"/>'
    for i in range(_TICKS + 1):
        n, b = frame.n_max * i // _TICKS, frame.b_max * i // _TICKS
        yield svg_text(frame.x(n), bottom + 18, str(n), "middle")
        yield svg_text(_LEFT - 8, frame.y(b) + 4, size_text(b), "end")
    yield svg_text((_LEFT + right) / 2, bottom + 40, "context, tokens", "middle")


def _legend(found: Answer) -> Iterable[str]:
    asked = found.question
    title = f"KV cache of {asked.model.arch}, {asked.type_k}/{asked.type_v}, {found.rule.name}"
    yield svg_text(_LEFT, 20, title, "start", "#111")
    yield svg_text(_LEFT, 40, "allocated", "start", _ALLOCATED)
    yield svg_text(_LEFT + 72, 40, "ideal, one sequence", "start", _IDEAL)


def _outcome(found: Answer, frame: _Frame) -> Iterable[str]:
    """What is served, and the memory that bounds it where it is in the picture."""
    served, memory = int(found.context.effective), found.question.memory
    if served:
        yield _mark(frame.x(served), f"served: {served}", 28, "#2a7a3b")
    if memory is not None and memory.for_cache <= frame.b_max:
        at = frame.y(memory.for_cache)
        yield f'<path d="M{_LEFT} {at:.2f}H{_WIDTH - _RIGHT}" stroke="#a33" stroke-dasharray="2 3"/>'
        text = f"memory for the cache: {size_text(memory.for_cache)}"
        yield svg_text(_WIDTH - _RIGHT, at - 5, text, "end", "#a33")


def _mark(at: float, text: str, below: int, colour: str, dash: str = "") -> str:
    anchor, shift = ("end", -4) if at > _WIDTH / 2 else ("start", 4)
    line = f'<path d="M{at:.2f} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="{colour}"{dash}/>'
    return line + svg_text(at + shift, _TOP + below, text, anchor, colour)
