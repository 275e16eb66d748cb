"""What turns reused and why prompts were computed, beside sums taken from the events themselves."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.events import Op
from kvtape.report.data.reuse import MEANING, Turn, grouped, reasons, turns
from kvtape.traces.reader import open_log
from support.long_log import write_long_log

_NUMBERS = st.integers(0, 1000)
_SESSIONS = st.lists(st.lists(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS, _NUMBERS), max_size=12), max_size=4)


@given(_SESSIONS, st.integers(1, 20))
def test_summed_turns_lose_nothing_and_stay_in_their_session(sessions: list[list[tuple[int, ...]]], most: int) -> None:
    found = [Turn(("r", f"s{i}"), n + 1, n + 1, *row) for i, rows in enumerate(sessions) for n, row in enumerate(rows)]
    bars = grouped(found, most)
    assert len(bars) <= most + len(sessions)
    for name in ("reused", "forgotten", "prefilled", "suffix", "prefix"):
        assert sum(getattr(b, name) for b in bars) == sum(getattr(t, name) for t in found)
    covered = [(b.key, turn) for b in bars for turn in range(b.first, b.last + 1)]
    assert covered == [(t.key, t.first) for t in found]


def test_of_a_log_they_are_the_sums_over_its_events(tmp_path: Path) -> None:
    path = write_long_log(tmp_path / "l.duckdb", [300, 120])
    with open_log(path) as log:
        keys = [("long", "session-1"), ("long", "session-2")]
        events = [e for run, name in keys for e in log.events(run, name)]
        found, why = turns(log, keys), reasons(log, keys)
        assert [t.key for t in found] == sorted(t.key for t in found)
        assert sum(t.reused for t in found) == sum(e.reused or 0 for e in events)
        assert sum(t.prefilled for t in found) == sum(e.prefilled or 0 for e in events)
        assert sum(t.suffix for t in found) == sum(e.suffix or 0 for e in events) > 0
        computed = [e for e in events if e.op is Op.PREFILL]
        assert sum(r.events for r in why) == len(computed)
        assert sum(r.tokens for r in why) == sum(e.physical_prefill_tokens or 0 for e in computed)
        assert sum(r.elapsed_ns or 0 for r in why) == sum(e.elapsed_ns or 0 for e in computed)
        assert {r.reason for r in why} <= MEANING.keys()
        only = reasons(log, keys[1:])
        assert 0 < sum(r.events for r in only) < len(computed)


def test_every_reason_of_the_view_has_its_words(tmp_path: Path) -> None:
    from kvtape.traces.views import VIEWS

    doc = next(view.doc for view in VIEWS if view.name == "why_prefilled")
    named = doc.partition("Reasons:")[2].split("`")[1::2]
    assert set(named) == MEANING.keys()
