"""What a prompt was, by who exports requests and by who draws curves: both follow the hashes of one tape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kvtape.planner.events import Op
from kvtape.sim.blocks.from_log import read_log
from kvtape.traces.exporters.requests import prompt_requests
from kvtape.traces.reader import Log, open_log
from kvtape.traces.recorder import Recorder
from support.logs import KEY, TickClock, event, hashes_of, run_row, session_row

Step = tuple[Op, dict[str, Any], list[int] | None]
Found = tuple[list[list[int]], int]
"""Hashes of each prompt of which they are known, and how many prompts there are of which they are not."""

A = [i * 7 % 60 for i in range(80)]
B = [i * 11 % 60 + 1 for i in range(80)]
GENERATED = [3, 5, 7]


def exporter(log: Log) -> Found:
    found = [r.hashes for r in prompt_requests(log, "r0")]
    return [list(hashes) for hashes in found if hashes is not None], found.count(None)


def curve(log: Log) -> Found:
    trace = read_log(log)
    bounds = trace.starts.tolist()
    known = [trace.ids[a:b].tolist() for a, b in pairwise(bounds)]
    return known, trace.without_blocks


callers = pytest.mark.parametrize("caller", [exporter, curve])


def prompt(start: int, n_tokens: int) -> Step:
    return Op.PROMPT, {"start": start, "n_tokens": n_tokens}, None


def prefill(start: int, tokens: list[int]) -> Step:
    return Op.PREFILL, {"start": start, "stop": start + len(tokens), "cache_start": start}, tokens


def decode(start: int, tokens: list[int] = GENERATED) -> Step:
    return Op.DECODE, {"start": start, "stop": start + len(tokens), "cache_start": start}, tokens


def recompute(start: int, tokens: list[int]) -> Step:
    return Op.RECOMPUTE, {"start": start, "stop": start + len(tokens), "cache_start": start}, tokens


def truncate(cut: int) -> Step:
    return Op.TRUNCATE, {"start": cut}, None


def asked(tokens: list[int]) -> list[Step]:
    return [prompt(0, len(tokens)), prefill(0, tokens)]


SNAPSHOT: Step = (Op.SNAPSHOT, {"snapshot_id": 0}, None)
RESTORE: Step = (Op.RESTORE, {"snapshot_id": 0}, None)
GENERATE: Step = (Op.GENERATE, {"n_tokens": 3}, None)
LOST: Step = (Op.LOST, {}, None)


def read(caller: Callable[[Log], Found], path: Path, *parts: Sequence[Step]) -> Found:
    """What `caller` finds in a session without content; each part by a process that does not know the tape before."""
    seq = 0
    for part in parts:
        with Recorder(path, run_row(), clock=TickClock(), key=KEY, max_latency_s=0, resume=seq > 0) as recorder:
            if seq == 0:
                recorder.open_session(session_row(content=False))
                part = [(Op.OPEN, {"n_tokens": 256}, None), *part]
            for op, columns, tokens in part:
                recorder.record(event(seq, op, **columns), tokens=tokens)
                seq += 1
    with open_log(path) as log:
        return caller(log)


@callers
def test_blocks_that_were_cut_do_not_stand_for_what_came_in_their_place(
    tmp_path: Path, caller: Callable[[Log], Found]
) -> None:
    later = [prompt(32, 80), truncate(32), prefill(32, B[32:]), prompt(32, 32), truncate(32), GENERATE]
    found = read(caller, tmp_path / "l.duckdb", asked(A), later)
    assert found == ([hashes_of(A), hashes_of(A[:32])], 1)


@callers
def test_a_tail_that_was_cut_is_not_that_of_another_tape_of_its_length(
    tmp_path: Path, caller: Callable[[Log], Found]
) -> None:
    later = [prompt(70, 80), truncate(70), prefill(70, B[70:])]
    assert read(caller, tmp_path / "l.duckdb", asked(A), later) == ([hashes_of(A), hashes_of(A[:64])], 0)


@callers
@pytest.mark.parametrize(("n", "listed"), [(80, 80), (64, 64), (70, 64)])
def test_a_prompt_that_is_wholly_on_the_tape_has_its_blocks(
    tmp_path: Path, caller: Callable[[Log], Found], n: int, listed: int
) -> None:
    """Of 70 tokens no event ever ended at 70: nothing tells the hash of the third block up to there."""
    steps = [*asked(A), decode(80), prompt(n, n), truncate(n), GENERATE, decode(n)]
    assert read(caller, tmp_path / "l.duckdb", steps) == ([hashes_of(A), hashes_of(A[:listed])], 0)


@callers
def test_a_tape_that_came_back_from_a_snapshot_grows_on(tmp_path: Path, caller: Callable[[Log], Found]) -> None:
    other = [prompt(16, 70), truncate(16), prefill(16, B[16:70])]
    again = [prompt(80, 100), prefill(80, B[:20])]
    found = read(caller, tmp_path / "l.duckdb", [*asked(A), SNAPSHOT, *other, RESTORE, *again])
    assert found == ([hashes_of(A), hashes_of([*A[:16], *B[16:70]]), hashes_of([*A, *B[:20]])], 0)


@callers
def test_after_lost_events_a_tape_is_known_once_it_begins_again(tmp_path: Path, caller: Callable[[Log], Found]) -> None:
    unknown = [prompt(40, 60), truncate(40), prefill(40, B[40:60])]
    again = [prompt(0, 50), truncate(0), prefill(0, B[:50])]
    found = read(caller, tmp_path / "l.duckdb", [*asked(A), LOST, *unknown, *again])
    assert found == ([hashes_of(A), hashes_of(B[:50])], 1)


@callers
def test_a_refilled_hole_is_no_end_of_the_tape(tmp_path: Path, caller: Callable[[Log], Found]) -> None:
    steps = [*asked(A), prompt(80, 80), recompute(10, A[10:20]), GENERATE]
    assert read(caller, tmp_path / "l.duckdb", steps) == ([hashes_of(A), hashes_of(A)], 0)


@callers
def test_a_suffix_is_not_the_prompt_of_its_length_that_was_taken_back(
    tmp_path: Path, caller: Callable[[Log], Found]
) -> None:
    """Who exports keeps the prompt, of which nothing is known; a curve counts what got on the tape, the suffix too."""
    taken_back = [prompt(0, 80), truncate(0), prefill(0, B[:64]), truncate(0)]
    suffix: Step = (Op.PROMPT, {"start": 0, "n_tokens": 80, "reason": "suffix"}, None)
    found = read(caller, tmp_path / "l.duckdb", [*asked(A), *taken_back, suffix, prefill(0, A[::-1])])
    wanted = ([hashes_of(A)], 1) if caller is exporter else ([hashes_of(A), hashes_of(A[::-1])], 0)
    assert found == wanted
