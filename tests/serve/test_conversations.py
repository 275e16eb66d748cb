from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.ranges import RangeSet
from kvtape.serve.conversations import Choice, Seat, choose_seat

TOKENS = st.lists(st.integers(0, 2), max_size=8).map(tuple)


def seat(slot: int, tape: tuple[int, ...] | None, **more: object) -> Seat:
    told: dict[str, object] = {"asked": len(tape or ()), "resident": RangeSet([(0, len(tape))] if tape else [])}
    return Seat(slot, False, tape, **(told | more))  # type: ignore[arg-type]


@st.composite
def seats(draw: st.DrawFn) -> list[Seat]:
    out = []
    for slot in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            out.append(Seat(slot, draw(st.booleans()), name=None))
            continue
        tape = draw(TOKENS)
        gone = draw(st.integers(0, len(tape)))
        out.append(
            Seat(
                slot,
                draw(st.booleans()),
                tape,
                draw(st.integers(0, len(tape))),
                RangeSet([(gone, len(tape))] if gone < len(tape) else []),
                draw(st.integers(0, 9)),
            )
        )
    return out


@given(seats(), TOKENS, st.booleans())
def test_a_choice_is_free_and_never_mixes_conversations(
    there: list[Seat], tokens: tuple[int, ...], branch: bool
) -> None:
    choice = choose_seat(there, tokens, None, may_branch=branch)
    free = {s.slot: s for s in there if not s.busy}
    assert (choice is None) == (not free)
    if choice is None:
        return
    taken = free[choice.slot]
    if choice.fresh:
        return
    assert taken.tape is not None
    shared = next((i for i, (a, b) in enumerate(zip(taken.tape, tokens, strict=False)) if a != b), None)
    n = min(len(taken.tape), len(tokens)) if shared is None else shared
    continues = n > 0 and n >= taken.asked
    assert continues or (branch and RangeSet([(0, n)]).issubset(taken.resident))


def test_the_longest_conversation_that_goes_on() -> None:
    there = [seat(0, (1, 2)), seat(1, (1, 2, 3)), seat(2, None)]
    assert choose_seat(there, (1, 2, 3, 4), None) == Choice(1, fresh=False)


def test_a_branch_with_a_hole_below_begins_anew() -> None:
    there = [seat(0, (1, 2, 3, 4), resident=RangeSet([(0, 1), (2, 4)]))]
    assert choose_seat(there, (1, 2, 3, 9), None) == Choice(0, fresh=True)
    assert choose_seat([seat(0, (1, 2, 3, 4))], (1, 2, 3, 9), None) == Choice(0, fresh=False)
    assert choose_seat([seat(0, (1, 2, 3, 4))], (1, 2, 3, 9), None, may_branch=False) == Choice(0, fresh=True)


def test_a_regenerated_answer_goes_on_behind_the_last_prompt_whatever_was_evicted() -> None:
    there = [seat(0, (1, 2, 3, 7, 7), asked=3, resident=RangeSet([(1, 5)]))]
    assert choose_seat(there, (1, 2, 3, 9), None) == Choice(0, fresh=False)


def test_a_shared_beginning_is_worth_less_than_an_empty_slot() -> None:
    there = [seat(0, tuple(range(20))), seat(1, None)]
    assert choose_seat(there, (0, 1, 2, 99), None) == Choice(1, fresh=True)


def test_the_slot_that_waited_longest_gives_way() -> None:
    there = [seat(0, (5,), last_used=4), seat(1, (6,), last_used=2)]
    assert choose_seat(there, (9, 9), None) == Choice(1, fresh=True)


def test_a_name_has_its_own_session_and_waits_for_it() -> None:
    mine = seat(1, (1, 2), name="mine")
    assert choose_seat([seat(0, None), mine], (9,), "mine") == Choice(1, fresh=False)
    busy = Seat(1, True, (1, 2), name="mine")
    assert choose_seat([seat(0, None), busy], (9,), "mine") is None
    assert choose_seat([seat(0, None), mine], (1, 2, 3), None) == Choice(0, fresh=True)
