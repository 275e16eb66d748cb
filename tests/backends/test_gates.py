"""What a session can do, asked before an operation."""

from __future__ import annotations

import pytest

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.gates import Gates
from kvtape.planner.capabilities import Capabilities


def test_an_operation_is_refused_for_the_reason_of_the_flag_it_needs() -> None:
    gates = Gates(Capabilities(remove_tail=True, cold_store=True), {}).without("cold_store", "nobody gave a budget")
    gates.require("truncate", "remove_tail")
    with pytest.raises(UnsupportedOperation, match=r"admit.*cold_store is false: nobody gave a budget"):
        gates.require("admit", "cold_store")
    with pytest.raises(UsageError, match="'teleport' is no capability"):
        gates.require("admit", "teleport")
