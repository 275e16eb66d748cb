"""`--isolate`: where a command's engines run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from kvtape.backends.protocol import Engine

    OpenEngine = Callable[[str, Path, Mapping[str, str]], Engine]

__all__ = ["Deadline", "Isolate", "engine_opener"]

Isolate = Annotated[
    bool,
    typer.Option("--isolate", help="Run each engine in a process of its own: a crash there ends its session alone."),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="S",
        min=0.001,
        help="With --isolate: seconds after which a silent engine is killed (default 1800).",
        show_default=False,
    ),
]


def engine_opener(*, isolate: bool, deadline: float | None) -> OpenEngine:
    """`open_engine` of here or of a host process. Raises UsageError for a deadline that nothing could enforce."""
    from kvtape.backends.errors import UsageError

    if not isolate:
        if deadline is not None:
            raise UsageError("--deadline goes with --isolate: an engine in this process cannot be stopped from outside")
        from kvtape.backends.registry import open_engine

        return open_engine
    from functools import partial

    from kvtape.backends.isolated.engine import open_isolated
    from kvtape.backends.isolated.process import Limits

    return partial(open_isolated, limits=Limits() if deadline is None else Limits(answer=deadline))
