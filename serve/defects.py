"""Where an error that should not be came from, without its text, which may hold a path or a part of a prompt."""

from __future__ import annotations

__all__ = ["place_of"]


def place_of(err: BaseException) -> str:
    """Function and line that raised it."""
    trace = err.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return "nowhere" if trace is None else f"{trace.tb_frame.f_code.co_qualname}:{trace.tb_lineno}"
