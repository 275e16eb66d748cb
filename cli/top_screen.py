"""The screen of `kvtape top`: a frame of a view, and the keys that were pressed while it was shown."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

    from kvtape.backends.protocol import Clock
    from kvtape.cli.top_view import Happening, SessionLine, View

__all__ = ["QUIT", "Keys", "frame", "keys", "screen"]

QUIT = "q"
_BAR = 10
_SLICE_S = 0.25
_LATEST_ROWS = 5
_AROUND = 6
"""Lines of a frame beside its rows: the title, the heads of the table, what is left out, the keys."""


def frame(
    view: View, log: str, height: int, width: int = 80, *, events_per_s: float | None, problem: str | None
) -> RenderableType:
    """What fits `height` lines of `width` cells: the log, its sessions, what happened last.

    `events_per_s`: since the frame before; `problem`: why the view is an old one.
    """
    from rich.console import Group
    from rich.text import Text

    latest = view.latest[: min(_LATEST_ROWS, max(0, height - _AROUND - 3))]
    room = max(1, height - _AROUND - len(latest) - bool(latest))
    shown, hidden = view.sessions[:room], len(view.sessions) - room
    parts: list[RenderableType] = [_line(_title(view, log, events_per_s))]
    parts.append(_line(problem or _totals(view), "bold red" if problem else ""))
    parts.append(_table(shown, width))
    if hidden > 0:
        parts.append(_line(f"and {hidden} more sessions; --session S shows one alone"))
    if latest:
        parts.append(Text())
        parts += [_line(_happened(each), "red" if each.op == "fatal" else "") for each in latest]
    parts.append(_line("q quits", "dim"))
    return Group(*parts)


def _line(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(_printable(text), style=style, no_wrap=True, overflow="ellipsis")


def _printable(text: str) -> str:
    """Names and reasons are other people's: no line ends, no escape codes."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _title(view: View, log: str, events_per_s: float | None) -> str:
    state = "sealed" if view.sealed else "recording, or left by a recorder that died"
    speed = "" if events_per_s is None else f", {events_per_s:.3g}/s"
    waiting = f", {view.unacknowledged} not acknowledged yet" if view.unacknowledged else ""
    # The name is last: where it is long, it is what is cut.
    return f"{state}, {view.events:,} events{speed}{waiting}: {log}"


def _totals(view: View) -> str:
    alive = [s for s in view.sessions if s.state == "open"]
    fatal = sum(s.fatal is not None for s in view.sessions)
    return (
        f"{len(view.sessions)} sessions: {len(alive)} open, {fatal} fatal; "
        f"{sum(s.resident for s in alive):,} tokens resident (open), {sum(s.evicted for s in view.sessions):,} evicted"
    )


class _Column(NamedTuple):
    """A column that is shown from `least` cells of the whole on: a session's name is worth more than the rest."""

    name: str
    least: int
    justify: Literal["left", "right"]
    text: Callable[[SessionLine], str]


def _speed(s: SessionLine) -> str:
    return "-" if s.tokens_per_s is None else f"{s.tokens_per_s:.{0 if s.tokens_per_s >= 100 else 1}f}"


_COLUMNS: Final = (
    _Column("state", 28, "left", lambda s: s.state),
    _Column("context", 72, "left", lambda s: _fill(s)),
    _Column("resident", 0, "right", lambda s: str(s.resident)),
    _Column("evicts", 60, "right", lambda s: str(s.evicts)),
    _Column("evicted", 38, "right", lambda s: str(s.evicted)),
    _Column("tok/s", 46, "right", _speed),
    _Column("last", 52, "left", lambda s: s.op),
)


def _table(sessions: tuple[SessionLine, ...], width: int) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    table.add_column("session", no_wrap=True, overflow="ellipsis", ratio=1)
    shown = [column for column in _COLUMNS if width >= column.least]
    for column in shown:
        table.add_column(column.name, justify=column.justify, no_wrap=True)
    for s in sessions:
        style = "red" if s.state == "fatal" else "dim" if s.state == "closed" else ""
        table.add_row(_cell(s.session_id), *(_cell(column.text(s)) for column in shown), style=style)
    return table


def _cell(text: str) -> Any:
    """A session's name may look like markup."""
    from rich.text import Text

    return Text(_printable(text))


def _fill(s: SessionLine) -> str:
    """How much of the context is resident."""
    if not s.n_ctx:
        return ""
    full = min(_BAR, round(_BAR * s.resident / s.n_ctx))
    return "█" * full + "░" * (_BAR - full) + f" {100 * s.resident // s.n_ctx} %"


def _happened(h: Happening) -> str:
    where = "" if h.start is None else f" [{h.start}, {h.stop})"
    count = "" if h.n_tokens is None else f" {h.n_tokens} tokens"
    why = ": ".join(part for part in (h.error_class, h.reason) if part)
    return f"{h.session_id} #{h.seq} {h.op}{count}{where}{f' ({why})' if why else ''}"


@contextmanager
def screen() -> Iterator[Live]:
    """The terminal's other screen, given back at the end as it was, also where SIGTERM or SIGHUP is the end."""
    from rich.console import Console
    from rich.live import Live

    from kvtape.cli.output import colour_system

    console = Console(highlight=False, markup=False, color_system=colour_system())
    before = [(number, signal.signal(number, _leave)) for number in (signal.SIGTERM, signal.SIGHUP)]
    try:
        with Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
            yield live
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _leave(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


@contextmanager
def keys() -> Iterator[Keys]:
    """Keys as they are pressed, not shown; the terminal is given back as it was. Without a terminal there are none."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    import termios
    import tty

    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


class Keys:
    """The keyboard while the screen is shown."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def quits_before(self, due_ns: int, clock: Clock) -> bool:
        """Whether QUIT is pressed before the clock says `due_ns`; returns then, or at that time."""
        while (left := due_ns - clock.now_ns()) > 0:
            waiting = [] if self._descriptor is None else [self._descriptor]
            # In slices: a Ctrl-C that comes just before the wait begins is seen at its end.
            ready, _, _ = select.select(waiting, [], [], min(_SLICE_S, left / 1e9))
            if ready and self._descriptor is not None:
                data = os.read(self._descriptor, 64)
                if not data or QUIT in data.decode(errors="ignore").lower():  # no data: the terminal is gone
                    return True
        return False
