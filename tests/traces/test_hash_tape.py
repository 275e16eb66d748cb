"""The tape that is followed through a log knows what the recorder knew, and never tells another prompt's blocks."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvtape.planner.events import Op
from kvtape.traces.hash_tape import HashTape
from kvtape.traces.tape import BLOCK_TOKENS, Tape
from support.logs import KEY, event, hashes_of


def brought(tokens: list[int], *, known: bool = True) -> HashTape:
    tape = HashTape()
    tape.brought(0, len(tokens), hashes_of(tokens) if known else [], BLOCK_TOKENS)
    return tape


A = [i * 7 % 60 for i in range(100)]


def test_a_path_has_whole_blocks_and_the_partial_one_that_was_seen() -> None:
    tape = brought(A)
    assert (tape.length, tape.size) == (100, 32)
    assert tape.path(100) == hashes_of(A)
    assert tape.path(96) == hashes_of(A[:96])
    assert tape.path(90) == hashes_of(A[:64])
    assert (tape.path(20), tape.path(0), tape.path(101)) == (None, None, None)
    assert HashTape().path(0) is None


def test_a_cut_takes_every_block_that_reaches_past_it() -> None:
    tape = brought(A)
    tape.cut(32)
    assert (tape.length, tape.path(32), tape.path(64)) == (32, hashes_of(A[:32]), None)
    tape.brought(32, 100, [], 32)
    assert (tape.path(100), tape.path(64), tape.path(32)) == (None, None, hashes_of(A[:32]))
    tape = brought(A)
    tape.cut(100)
    assert tape.path(100) == hashes_of(A)
    tape.cut(99)
    assert tape.path(99) == hashes_of(A[:96])
    tape.brought(99, 100, [], 32)
    assert tape.path(100) == hashes_of(A[:96]), "the tail of before the cut is another one"


def test_what_comes_in_the_middle_takes_what_was_behind_it() -> None:
    tape = brought(A)
    tape.brought(32, 50, [], 32)
    assert (tape.length, tape.path(50), tape.path(100)) == (50, hashes_of(A[:32]), None)


def test_a_recompute_changes_nothing() -> None:
    tape = brought(A)
    tape.follow(Op.RECOMPUTE, 10, 20, None, hashes_of(A[:20]), 32)
    assert (tape.length, tape.path(100)) == (100, hashes_of(A))


def test_a_snapshot_is_its_own_and_one_that_was_not_seen_is_not_known() -> None:
    tape = brought(A)
    tape.save(0)
    for _ in range(2):
        tape.cut(0)
        tape.brought(0, 64, hashes_of([9] * 64), 32)
        tape.restore(0)
        assert (tape.length, tape.path(100)) == (100, hashes_of(A))
    tape.restore(1)
    assert (tape.length, tape.path(32)) == (0, None)


def test_rows_of_blocks_of_another_size_are_not_known() -> None:
    tape = brought(A)
    tape.brought(100, 164, [1, 2, 3, 4], 16)
    assert (tape.size, tape.length, tape.path(164), tape.path(96)) == (32, 164, None, hashes_of(A[:96]))


class Followed(RuleBasedStateMachine):
    """A recorder, at times one that goes on without knowing the tape, and who reads what it told."""

    @initialize()
    def begin(self) -> None:
        self.tokens: list[int] = []
        self.saved: dict[int, list[int]] = {}
        self.recorder, self.reader, self.whole = Tape(KEY), HashTape(), True

    def play(
        self, op: Op, start: int | None = None, tokens: list[int] | None = None, snapshot: int | None = None
    ) -> None:
        stop = None if start is None or tokens is None else start + len(tokens)
        told = self.recorder.follow(event(0, op, start=start, stop=stop, snapshot_id=snapshot), tokens)
        ids = None if tokens is None else [int(h, 16) for h in told]
        self.reader.follow(op, start, stop, snapshot, ids, None if tokens is None else BLOCK_TOKENS)

    @rule(op=st.sampled_from([Op.PREFILL, Op.DECODE]), n=st.integers(1, 80), token=st.integers(0, 1))
    def extend(self, op: Op, n: int, token: int) -> None:
        self.play(op, len(self.tokens), [token] * n)
        self.tokens += [token] * n

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def recompute(self, data: st.DataObject) -> None:
        start = data.draw(st.integers(0, len(self.tokens) - 1))
        stop = data.draw(st.integers(start + 1, len(self.tokens)))
        self.play(Op.RECOMPUTE, start, self.tokens[start:stop])

    @rule(part=st.integers(0, 100))
    def truncate(self, part: int) -> None:
        cut = len(self.tokens) * part // 100
        self.play(Op.TRUNCATE, cut)
        del self.tokens[cut:]

    @rule()
    def snapshot(self) -> None:
        self.play(Op.SNAPSHOT, snapshot=len(self.saved))
        self.saved[len(self.saved)] = self.tokens[:]

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.saved)))
        self.play(Op.RESTORE, snapshot=number)
        self.tokens = self.saved[number][:]

    @rule()
    def lose(self) -> None:
        self.play(Op.LOST)
        self.whole = False

    @rule()
    def go_on_in_another_process(self) -> None:
        """Which has neither the tape nor the snapshots of the one before."""
        self.recorder, self.saved, self.whole = Tape(KEY), {}, False

    @invariant()
    def every_path_is_that_of_the_tape(self) -> None:
        whole = hashes_of(self.tokens)
        for length in {0, 1, *range(0, len(self.tokens) + 1, BLOCK_TOKENS), len(self.tokens)}:
            path = self.reader.path(length)
            if path is not None:
                assert path in (hashes_of(self.tokens[:length]), whole[: length // BLOCK_TOKENS]), length
            elif self.whole:
                assert length < BLOCK_TOKENS, length

    @invariant()
    def the_recorders_tape_is_known_whole(self) -> None:
        """Also after events were lost, once the tape began again."""
        n = len(self.tokens)
        if len(self.recorder) == n >= BLOCK_TOKENS and self.reader.length == n:
            path = self.reader.path(n)
            assert path is not None
            assert path[: n // BLOCK_TOKENS] == hashes_of(self.tokens)[: n // BLOCK_TOKENS]


TestFollowed = Followed.TestCase
