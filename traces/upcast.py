"""Rows of older logs in the shape of today: one pure function for each step from a schema version to the next.

Old rows are never rewritten. A step takes the name of a table and its rows as Arrow columns and gives the rows as the
next version has them; the columns that a table is ordered by stay for ever. A column whose value an old log cannot
know becomes NULL, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa

from kvtape.traces.schema import SCHEMA_VERSION

__all__ = ["STEPS", "Step", "upcast"]

Step = Callable[[str, pa.Table], pa.Table]

STEPS: Mapping[int, Step] = {}
"""Schema version n -> the step to n + 1. Version 1 is the first and so far the only one."""


def upcast(
    table: str, rows: pa.Table, version: int, *, to: int = SCHEMA_VERSION, steps: Mapping[int, Step] = STEPS
) -> pa.Table:
    """`rows` of `table`, written under schema `version`, as version `to` has them; themselves when that is the same."""
    for step in range(version, to):
        rows = steps[step](table, rows)
    return rows
