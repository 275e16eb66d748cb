"""Columns come back as they were, and what a script could not hold is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.report.packing import pack, unpack

_VALUES = st.integers(-(2**52) + 1, 2**52 - 1) | st.integers(-300, 300)


@given(
    st.integers(0, 30).flatmap(lambda n: st.lists(st.lists(_VALUES, min_size=n, max_size=n), min_size=1, max_size=4))
)
def test_columns_come_back(columns: list[list[int]]) -> None:
    arrays = [np.array(column, dtype=np.int64) for column in columns]
    back = unpack(pack(arrays), len(arrays), len(columns[0]))
    assert [column.tolist() for column in back] == columns


def test_a_value_that_no_script_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="4503599627370496 is more than a script can hold"):
        pack([np.array([1, 2**52])])
