"""Content hashes: one prefix, one chain; no key, no test of a guess; no hashes where the tape is not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.events import Op
from kvtape.traces.reader import open_log
from kvtape.traces.tape import BLOCK_TOKENS, Tape
from support.logs import KEY, event, script, write_log
from support.sessions import random_scripts

tokens = st.lists(st.integers(0, 99), max_size=100)


def fed(parts: list[list[int]], key: bytes = KEY) -> list[list[str]]:
    tape = Tape(key)
    return [tape.follow(event(0, Op.PREFILL, start=len(tape), stop=len(tape) + len(p)), p) for p in parts]


@given(tokens, tokens)
def test_hashes_agree_exactly_as_far_as_whole_blocks_do(left: list[int], right: list[int]) -> None:
    ours, theirs = fed([left])[0], fed([right])[0]
    shared = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    for block in range(min(len(left), len(right)) // BLOCK_TOKENS):
        assert (ours[block] == theirs[block]) == ((block + 1) * BLOCK_TOKENS <= shared)
    assert (ours == theirs) == (left == right)


@given(tokens, st.integers(0, 100))
def test_pieces_do_not_change_whole_blocks_or_the_end(whole: list[int], cut: int) -> None:
    parts = fed([whole[:cut], whole[cut:]])
    straight = fed([whole])[0]
    by_block = dict(enumerate(parts[0])) | dict(enumerate(parts[1], len(whole[:cut]) // BLOCK_TOKENS))
    assert [by_block[i] for i in range(len(straight))] == straight


def test_another_key_gives_other_hashes() -> None:
    assert fed([[1, 2, 3]]) != fed([[1, 2, 3]], bytes(32))


def test_a_session_that_ended_keeps_nothing_in_memory() -> None:
    tape = Tape(KEY)
    tape.follow(event(0, Op.PREFILL, start=0, stop=40), list(range(40)))
    tape.follow(event(1, Op.SNAPSHOT, snapshot_id=0), None)
    assert (len(tape), len(tape._chain), len(tape._snapshots)) == (40, 1, 1)
    tape.follow(event(2, Op.CLOSE, reason="asked"), None)
    assert (len(tape), len(tape._chain), len(tape._snapshots)) == (0, 0, 0)


@given(random_scripts(97))
def test_every_event_hashes_the_tape_as_it_then_is(made) -> None:  # type: ignore[no-untyped-def]
    tape, model, saved = Tape(KEY), [], {}
    for e in made.events:
        row = made.tokens.get(e.seq)
        hashes = tape.follow(e, None if row is None else row.tokens)
        if e.op in (Op.PREFILL, Op.DECODE):
            model += row.tokens
        elif e.op == Op.TRUNCATE:
            del model[e.start :]
        elif e.op == Op.SNAPSHOT:
            saved[e.snapshot_id] = list(model)
        elif e.op == Op.RESTORE:
            model = list(saved[e.snapshot_id])
        if row is not None:
            assert hashes == fed([model[: e.stop]])[0][e.start // BLOCK_TOKENS :]
        assert len(tape) == len(model)


@pytest.mark.parametrize("op", [Op.PREFILL, Op.DECODE, Op.RECOMPUTE])
def test_an_unknown_tape_gives_no_hashes(op: Op) -> None:
    tape = Tape(KEY)
    tape.follow(event(0, Op.PREFILL, start=0, stop=3), [1, 2, 3])
    assert tape.follow(event(1, op, start=7, stop=9), [1, 2]) == []
    assert tape.follow(event(2, op, start=1, stop=3), [9, 9]) == []
    tape.follow(event(3, Op.LOST), None)
    assert tape.follow(event(4, op, start=3, stop=4), [4]) == []
    assert tape.follow(event(5, Op.TRUNCATE, start=0), None) == []
    assert len(tape.follow(event(6, Op.PREFILL, start=0, stop=1), [4])) == 1


def test_the_chain_goes_on_over_batches_and_names_the_tail(tmp_path: Path) -> None:
    made = script()
    with open_log(write_log(tmp_path / "a.duckdb", [made], content=False)) as log:
        rows = log.tokens("r0", "s0")
    first = next(iter(made.tokens.values()))
    second = made.tokens[sorted(made.tokens)[1]]
    both = [*first.tokens, *second.tokens]
    assert json.loads(rows[first.seq].hashes) == fed([list(first.tokens)])[0]
    assert json.loads(rows[second.seq].hashes) == fed([both])[0][len(first.tokens) // BLOCK_TOKENS :]
