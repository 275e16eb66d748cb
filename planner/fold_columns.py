"""The residency fold over columns: events that join up (`column_runs`) are folded as one.

What is left for each run is one comparison with the state and one call of each of the functions that `apply` calls
for every event. Every other event, and every event of a run that does not fit its state, goes through `apply`, which
refuses what is illegal by the event's own name.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvtape.planner import layout as lay
from kvtape.planner.column_runs import Run, runs
from kvtape.planner.event_columns import EventColumns
from kvtape.planner.residency import apply
from kvtape.planner.residency_rules import extend
from kvtape.planner.residency_state import ResidencyState, changed

__all__ = ["fold_columns", "folded_runs"]


def fold_columns(columns: EventColumns, state: ResidencyState | None = None) -> ResidencyState:
    """The state after all events: what `apply` gives one by one. Raises IllegalEvent as `apply` does.

    Like `apply` it does not look at the recorded digests; `fold` does.
    """
    now = state or ResidencyState()
    for _, _, after in folded_runs(columns, now):
        now = after
    return now


def folded_runs(
    columns: EventColumns, state: ResidencyState | None = None
) -> Iterator[tuple[int, int, ResidencyState]]:
    """`(first, stop, state after)` of rows `[first, stop)`: those that join up as one, every other by itself.

    Of rows that are folded as one, each prefill or decode makes its range resident, and each evict drops its own.
    Raises IllegalEvent as `apply` does, where it comes to the event.
    """
    now = state or ResidencyState()
    for run in runs(columns):
        after = _folded(now, run) if run.fit else None
        if after is not None:
            now = after
            yield run.first, run.first + run.n, now
            continue
        for i in range(run.first, run.first + run.n):
            now = apply(now, columns.event(i))
            yield i, i + 1, now


def _folded(state: ResidencyState, run: Run) -> ResidencyState | None:
    """The state after a run; None when not all of it is legal here."""
    live = state.opened and not (state.closed or state.lost or state.fatal is not None)
    here = (run.seq, run.turn, run.generation) == (state.next_seq, state.turn, state.generation)
    room = not run.extends or state.resident_tokens + run.most <= state.n_ctx
    if not (live and here and room and run.least_tape <= state.tape_length <= run.most_tape):
        return None
    slides = run.evicts or run.shifts
    if slides and not _slides_here(state, run):
        return None
    if run.extends:
        try:
            state = extend(state, run.start, run.start + run.tokens, run.cache_start)
        except ValueError:
            return None
    prefix = run.prefix if run.turns else state.prefix_length
    offered = run.offered if run.prompts else state.offered
    layout = _slid(state.layout, run) if slides else state.layout
    return changed(
        state,
        layout=layout,
        next_seq=run.seq + run.n,
        turn=state.turn + run.turns,
        prefix_length=prefix,
        offered=offered,
    )


def _slides_here(state: ResidencyState, run: Run) -> bool:
    """Whether all evicts and shifts are of the last rows of the cache, which are the tape's last, and leave some."""
    if not state.layout:
        return False
    last = state.layout[-1]
    before = state.layout[-2] if len(state.layout) > 1 else None
    fits = last.tape_stop == state.tape_length and last.length + run.least_left > 0
    fits &= not run.evicts or run.head == last.tape_start
    fits &= not (run.placed or run.shifts) or run.cache_head == last.cache_start
    if not run.shifts:
        return fits
    # Rows that move next to those before them in the tape too would become one segment with them.
    apart = before is None or before.tape_stop < last.tape_start
    floor = before.cache_stop if before else 0
    return fits and apart and run.cache_start == last.cache_stop and last.cache_start + run.lowest >= floor


def _slid(layout: lay.Layout, run: Run) -> lay.Layout:
    layout = lay.remove(layout, run.head, run.head + run.taken) if run.evicts else layout
    last = layout[-1]
    return lay.shift(layout, last.cache_start, last.cache_stop, run.turned) if run.turned else layout
