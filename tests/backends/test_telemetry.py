"""I4 across engines: the same script gives the same logical counters, in the rows and in `explain()`."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest

from kvtape.backends.journal import COUNTERS
from kvtape.backends.session import PrefixStatus, SuffixStatus
from support.parity import TOKENS, open_session, said

pytestmark = pytest.mark.contract("I4")
ENGINES = ("toy", "llama", "openvino")
POLICIES = (
    "none",
    "stream:sink=4,recent=60,block=16",
    "stream:sink=4,recent=60,block=16,positions=rebased,hole=refill",
    "class:budget=160,block=16",
)
Row = tuple[str, dict[str, int | None]]


@functools.cache
def told(name: str, policy: str, evict_by: str) -> tuple[list[Row], dict[str, int], list[Any]]:
    """The counters of every row, the totals, and what each call returned."""
    played = open_session(name, policy, evict_by=evict_by)
    statuses: list[Any] = []
    with played.session as session:
        statuses.append(session.ensure_prefix(TOKENS[:180]))
        said(session, 20, 1)
        statuses.append(session.ensure_prefix([*session.tape[:150], *TOKENS[200:230]]))
        statuses.append(session.prefill_suffix(TOKENS[230:250]))
        said(session, 40, 2)
        statuses.append(session.ensure_prefix(session.tape))
        totals = dict(session.explain().counters)
    rows = [(str(e.op), {c: getattr(e, c) for c in (*COUNTERS, "token_count_source")}) for e in played.sink.events]
    return rows, totals, statuses


@pytest.mark.parametrize("evict_by", ["native", "recompute"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ENGINES[1:])
def test_one_script_gives_the_same_counters_everywhere(name: str, policy: str, evict_by: str) -> None:
    assert told(name, policy, evict_by) == told("toy", policy, evict_by)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ENGINES)
def test_what_a_call_returns_is_what_its_row_says(name: str, policy: str) -> None:
    rows, totals, statuses = told(name, policy, "native")
    prefixes = [
        {k: r[k] for k in ("reused", "forgotten", "prefilled", "dropped")} for _, r in rows if r["reused"] is not None
    ]
    assert prefixes == [dataclasses.asdict(s) for s in statuses if isinstance(s, PrefixStatus)]
    suffixes = [r["suffix"] for _, r in rows if r["suffix"] is not None]
    assert suffixes == [s.suffix for s in statuses if isinstance(s, SuffixStatus)]
    assert totals == {c: sum(r[c] or 0 for _, r in rows) for c in COUNTERS}
    assert {r["token_count_source"] for op, r in rows if op in ("prefill", "decode")} == {"engine"}
