"""What modelled time can be: whole nanoseconds that a log can bear, and recorded ones at another pace."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Final

from kvtape.sim.errors import SimulationError

__all__ = ["END_OF_TIME_NS", "at_pace", "check_time"]

END_OF_TIME_NS: Final = 2**63 - 1
"""292 years: no time of a log may be later."""


def check_time(ns: int) -> None:
    """Raises SimulationError for a time that no log can bear."""
    if ns > END_OF_TIME_NS:
        raise SimulationError("simulated time passes 292 years; look at the costs, the link and the pace")


def at_pace(pace: float) -> Callable[[int], int]:
    """Recorded ns, so many times as fast: exact, halves to the even.

    Raises SimulationError for what is no pace; what is returned does for a time that no log can bear.
    """
    if not 0 < pace < float("inf"):
        raise SimulationError(f"pace {pace}: needs a number above 0")
    if pace == 1:
        return lambda ns: ns
    share = 1 / Fraction(str(pace))

    def paced(ns: int) -> int:
        found = round(ns * share)
        if found > END_OF_TIME_NS:
            raise SimulationError(f"pace {pace:g} stretches {ns / 1e9:g} s past 292 years; give a larger pace")
        return found

    return paced
