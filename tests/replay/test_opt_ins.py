"""What a log says of I5 to I7: nothing against a sound one, and each forged row by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.clock import ManualClock
from kvtape.backends.session import Session
from kvtape.planner.deferral import DEFERRED
from kvtape.planner.events import Event, Op
from kvtape.planner.opening import Opening, opening_of
from kvtape.planner.rows import SessionRow
from kvtape.planner.specs import parse_policy
from kvtape.replay.opt_ins import deferral_findings, precision_findings, speculation_findings
from kvtape.testing.sink import ListSink
from support.toys import toy_backend

TEXT = st.none() | st.text(min_size=1, max_size=12)


def recorded(**asked: Any) -> ListSink:
    """Two turns, each with a prefix, a suffix and a decode."""
    sink = ListSink()
    session = Session(
        toy_backend(n_ctx=64), parse_policy("none"), sink, ManualClock(), run_id="r", session_id="s", **asked
    )
    for turn in range(2):
        session.ensure_prefix([*session.tape, *range(5 + turn)])
        session.prefill_suffix([1, 2, 3])
        session.decode(4)
    session.close()
    return sink


def changed(events: list[Event], op: Op, nth: int = 0, **columns: Any) -> tuple[list[Event], int]:
    """The nth event of an op, changed, and its seq."""
    at = [i for i, e in enumerate(events) if e.op is op][nth]
    return [*events[:at], replace(events[at], **columns), *events[at + 1 :]], events[at].seq


@given(st.builds(Opening, TEXT, st.booleans(), st.booleans(), TEXT))
def test_what_a_session_says_is_what_is_read(said: Opening) -> None:
    if said.precision is None:
        said = replace(said, certified=None)
    event = replace(recorded_open(), detail=said.detail())
    assert opening_of([event]) == said
    assert (said.detail() is None) == (said == Opening())


def recorded_open() -> Event:
    return Event(run_id="r", session_id="s", seq=0, at_ns=0, op=Op.OPEN, turn=0, generation=0, n_tokens=64)


@pytest.mark.parametrize("detail", [None, "", "[]", "{", "3", '{"precision": 7, "defer_prefill": "yes"}'])
def test_what_cannot_be_read_asks_for_nothing(detail: str | None) -> None:
    assert opening_of([replace(recorded_open(), detail=detail)]) == Opening()
    assert opening_of([]) == Opening()


KNOB = {"backend": "llama", "kv_type_k": "q8_0", "kv_type_v": "q8_0", "flash_attention": True}
SAID = "k=q8_0,v=q8_0,fa=on"


def row(**columns: Any) -> SessionRow:
    return replace(recorded().sessions[0], **columns)


@pytest.mark.contract("I5")
@pytest.mark.parametrize(
    ("columns", "opening"),
    [
        ({}, Opening()),
        ({"backend": "llama", "kv_type_k": "f16", "kv_type_v": "f32", "flash_attention": False}, Opening()),
        ({"backend": "openvino", "kv_type_k": "f32", "kv_type_v": "f32"}, Opening()),
        ({"backend": "llama", "kv_type_k": None, "kv_type_v": None}, Opening()),
        (KNOB, Opening(SAID, certified=True)),
        (KNOB, Opening(SAID, certified=False)),
        (KNOB, Opening("k=q8_0,v=q8_0,fa=auto", certified=False)),
        ({"backend": "openvino", "kv_type_k": "u8", "kv_type_v": "u8"}, Opening("k=u8,v=u8", certified=False)),
        (
            {"backend": "openvino", "kv_type_k": "f32", "kv_type_v": "f32"},
            Opening("k=f32,v=f32,inference=bf16", certified=True),
        ),
    ],
)
def test_base_precisions_and_knobs_that_say_what_they_are_are_sound(columns: dict[str, Any], opening: Opening) -> None:
    assert precision_findings(row(**columns), [replace(recorded_open(), detail=opening.detail())]) == []


@pytest.mark.contract("I5")
@pytest.mark.parametrize(
    ("columns", "detail", "what"),
    [
        (KNOB, None, "says neither certified nor uncertified"),
        (
            {"backend": "openvino", "kv_type_k": "u8", "kv_type_v": "u8"},
            None,
            "opened with k=u8,v=u8, which is no base",
        ),
        (KNOB | {"kv_type_k": "f16"}, None, "opened with k=f16,v=q8_0,fa=on"),
        (KNOB | {"kv_type_v": "q4_0"}, Opening(SAID, certified=True).detail(), "its row says k=q8_0,v=q4_0"),
        (KNOB | {"flash_attention": False}, Opening(SAID, certified=True).detail(), "fa=off"),
        (KNOB, '{"precision": "k=q8_0,v=q8_0,fa=on"}', "does not say whether it is certified"),
    ],
)
def test_a_knob_that_is_not_owned_up_to_is_found(columns: dict[str, Any], detail: str | None, what: str) -> None:
    (found,) = precision_findings(row(**columns), [replace(recorded_open(), detail=detail)])
    assert (found.seq, what in found.what) == (0, True), found.what


@pytest.mark.contract("I5")
def test_a_log_of_before_claims_nothing() -> None:
    assert precision_findings(row(**KNOB), [replace(recorded_open(), schema_version=1)]) == []
    assert precision_findings(row(**KNOB), []) == []


@pytest.mark.contract("I6")
@pytest.mark.parametrize("defer", [False, True])
def test_a_sound_session_has_nothing_against_it(defer: bool) -> None:
    sink = recorded(defer_prefill=defer)
    assert opening_of(sink.events).defer_prefill is defer
    assert deferral_findings(sink.events) == []
    assert any(e.deferred_prefill_calls for e in sink.events) is defer
    assert speculation_findings(sink.events) == []
    assert precision_findings(sink.sessions[0], sink.events) == []


@pytest.mark.contract("I6")
@pytest.mark.parametrize(
    ("op", "columns", "what"),
    [
        (Op.PROMPT, {"detail": DEFERRED}, "prompt was deferred, although the session did not ask"),
        (Op.PREFILL, {"deferred_prefill_calls": 1, "deferred_prefill_tokens": 5}, "although the session did not ask"),
        (
            Op.PREFILL,
            {"deferred_prefill_calls": 1, "deferred_prefill_tokens": 5},
            "1 deferred prefills are computed, 0",
        ),
    ],
)
def test_deferral_that_nobody_asked_for_is_found(op: Op, columns: dict[str, Any], what: str) -> None:
    events, seq = changed(recorded().events, op, **columns)
    found = deferral_findings(events)
    assert any(b.seq == seq and what in b.what for b in found), found


@pytest.mark.contract("I6")
@pytest.mark.parametrize(
    ("op", "columns", "what"),
    [
        (Op.OPEN, {"detail": None}, "although the session did not ask"),
        (Op.PREFILL, {"deferred_prefill_tokens": 3}, "3 deferred tokens on a prefill of 8"),
        (Op.PREFILL, {"deferred_prefill_calls": 3}, "3 deferred prefills are computed, 2 were waiting"),
        (Op.PREFILL, {"deferred_prefill_tokens": 0}, "2 deferred prefills without a token"),
        (Op.DECODE, {"deferred_prefill_tokens": 4}, "4 deferred tokens on a decode of 4"),
        (Op.PROMPT, {"detail": None}, "2 deferred prefills are computed, 1 were waiting"),
    ],
)
def test_deferral_that_does_not_add_up_is_found(op: Op, columns: dict[str, Any], what: str) -> None:
    found = deferral_findings(changed(recorded(defer_prefill=True).events, op, **columns)[0])
    assert any(what in b.what for b in found), found


def speculated() -> list[Event]:
    """A session whose decodes tell of drafts, as a speculating one's do."""
    events = recorded().events
    events, _ = changed(events, Op.OPEN, detail=Opening(speculation="lookup").detail())
    for nth in range(2):
        told = {"drafted_tokens": 3, "accepted_tokens": 2, "rejected_tokens": 1, "decode_calls": 2}
        events, _ = changed(events, Op.DECODE, nth, **told)
    return events


@pytest.mark.contract("I7")
def test_speculation_that_was_asked_for_is_sound() -> None:
    assert speculation_findings(speculated()) == []


@pytest.mark.contract("I7")
@pytest.mark.parametrize(
    ("op", "columns", "what"),
    [
        (Op.OPEN, {"detail": None}, "decode was speculated, although the session did not ask"),
        (Op.DECODE, {"rejected_tokens": 0}, "drafted 3 is not accepted 2 + rejected 0"),
        (Op.DECODE, {"rejected_tokens": None}, "drafted 3 is not accepted 2 + rejected None"),
        (Op.DECODE, {"drafted_tokens": 6, "accepted_tokens": 5}, "accepted 5 of 4 tokens"),
        (Op.DECODE, {"decode_calls": 1}, "4 tokens from 1 calls and 2 accepted ones"),
        (Op.PREFILL, {"drafted_tokens": 0, "accepted_tokens": 0, "rejected_tokens": 0}, "a prefill has counters"),
        (Op.DECODE, {"resident_digest": 7}, "resident_digest after a decode is another than the fold's"),
        (Op.DECODE, {"layout_digest": 7}, "layout_digest after a decode is another than the fold's"),
        # A rejected row that stayed.
        (Op.DECODE, {"resident_tokens": 13}, "resident_tokens after a decode is another than the fold's"),
    ],
)
def test_speculation_that_nobody_asked_for_or_that_does_not_add_up_is_found(
    op: Op, columns: dict[str, Any], what: str
) -> None:
    events, seq = changed(speculated(), op, **columns)
    found = speculation_findings(events)
    assert any(what in b.what and b.seq in (seq, b.seq if op is Op.OPEN else seq) for b in found), found


@pytest.mark.contract("I7")
def test_what_cannot_be_folded_is_no_speculation_at_fault() -> None:
    events = speculated()
    assert speculation_findings([events[0], *events[3:]]) == []
