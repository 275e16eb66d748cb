"""What goes between two processes: every value comes back as it was, and damage comes out as one error."""

from __future__ import annotations

import contextlib
import json
import pickle
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kvtape.backends import errors
from kvtape.backends.errors import ContextOverflow, EngineFault, FatalClass, KvtapeError, UnsupportedOperation
from kvtape.backends.isolated.failures import pack_error, unpack_error
from kvtape.backends.isolated.frames import receive, send
from kvtape.backends.isolated.opened import Opened
from kvtape.backends.isolated.values import RECORDS, Unsendable, WireError, decode, encode
from kvtape.backends.protocol import AttentionMass, Computed, DecodeRun, KvRows, ModelFacts, SessionConfig, Witness
from kvtape.backends.verifying import Verified
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.layout import Segment
from kvtape.planner.ranges import RangeSet

DTYPES = ("<f4", "<f2", "<f8", "<i8", "<i4", "|u1", "|b1", ">i2", "<u8")
arrays = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(np.dtype(dtype), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
    st.sampled_from(FatalClass),
    st.builds(Segment, st.integers(0, 99), st.integers(1, 99), st.integers(0, 99)),
    st.lists(st.tuples(st.integers(0, 20), st.integers(21, 40))).map(RangeSet),
    arrays,
)
values = st.recursive(
    plain,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text(), inner),
        st.frozensets(st.integers()),
    ),
    max_leaves=12,
)


def there_and_back(value: object) -> Any:
    text, buffers = encode(value)
    return decode(text, [bytearray(b) for b in buffers])


def assert_same(one: Any, other: Any) -> None:
    """Equal to the bit, and of the same types all the way down."""
    assert type(one) is type(other)
    if isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif type(one) in RECORDS.values():
        for name in one.__dataclass_fields__:
            assert_same(getattr(one, name), getattr(other, name))
    else:
        assert one == other


@given(values)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    assert_same(there_and_back(value), value)


def test_every_record_of_the_protocol_comes_back() -> None:
    rows = KvRows((np.ones((2, 4), np.float16),), (np.zeros((0, 4), np.float32),))
    facts = ModelFacts("a/b.gguf", "f", "llama", 320, 4096, frozenset({0, 2}))
    config = SessionConfig(options={"scores": "on"})
    examples = (
        AttentionMass(np.arange(3), (0, 2), 5, np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)),
        Capabilities(remove_tail=True, sliding_window_attention_tokens=64),
        Computed(np.empty(0, np.float32), 0, 0),
        DecodeRun((1, 2), np.ones(4, np.float32), 2, "n"),
        rows,
        facts,
        Opened("llama", "1", facts, config, 256, Capabilities(), {"cold_store": None}, True, None, 0.5),
        Segment(1, 2, 3),
        config,
        Verified(1, np.ones(4, np.float32), 1),
        Witness(np.arange(2), "engine", rows, rows),
    )
    assert {type(e) for e in examples} == set(RECORDS.values())
    for example in examples:
        assert_same(there_and_back(example), example)


def test_an_array_that_arrived_can_be_written_to() -> None:
    assert there_and_back(np.ones(3, np.float32)).flags.writeable


def test_tokens_of_any_sequence_arrive_as_a_list() -> None:
    assert there_and_back(range(3)) == [0, 1, 2]
    assert there_and_back([np.int64(3), True]) == [np.int64(3), True]
    assert type(there_and_back([np.int32(3)])[0]) is np.int32


@pytest.mark.parametrize("value", [object(), print, [object()], {1: lambda: 0}, np.array(["a"]), Exception("x")])
def test_what_has_no_place_in_the_protocol_is_not_sent(value: object) -> None:
    with pytest.raises(Unsendable, match="another process"):
        encode(value)


@given(values, st.data())
def test_damaged_text_is_one_error_or_a_plain_value(value: Any, data: st.DataObject) -> None:
    text, buffers = encode(value)
    raw = bytearray(text)
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(WireError):
        decode(bytes(raw), [bytearray(b) for b in buffers])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"bytes": 0}',
        b'{"array": [0, "<f4", [2]]}',
        b'{"array": [0, "O", []]}',
        b'{"number": ["<i2", 99999]}',
        b'{"number": ["<f4,<f4", 1]}',
        b'{"call": ["os.system", "true"]}',
        b'{"record": ["Popen", {}]}',
        b'{"record": ["Segment", {"tape_start": 1}]}',
        b'{"fatal": "tired"}',
        b'{"ranges": [[3, 1]]}',
        b"[" * 200_000,
        pickle.dumps([1]),
    ],
)
def test_no_text_makes_anything_but_values(text: bytes) -> None:
    with pytest.raises(WireError):
        decode(text, [])


def pair() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.settimeout(10)
    return ours, theirs


def test_large_messages_go_through_in_pieces() -> None:
    ours, theirs = pair()
    message = [[np.full((300, 700), i, np.float32) for i in range(150)], b"", np.empty((0, 3)), "end"]
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, message))
        sender.start()
        assert_same(receive(theirs), message)
        sender.join()


def test_messages_follow_each_other() -> None:
    ours, theirs = pair()
    with ours, theirs:
        for i in range(3):
            send(ours, ["n", i, np.arange(i)])
        for i in range(3):
            assert_same(receive(theirs), ["n", i, np.arange(i)])
        send(ours, "last")
        ours.close()
        assert receive(theirs) == "last"
        with pytest.raises(EOFError):
            receive(theirs)


def test_a_message_cut_short_is_an_end() -> None:
    ours, theirs = pair()
    with ours, theirs:
        ours.sendall(struct.pack("<4sII", b"KVTF", 100, 0) + b"half")
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<4sII", b"HTTP", 1, 0),
        struct.pack("<4sII", b"KVTF", 1, 1 << 30),
        struct.pack("<4sIIQ", b"KVTF", 1, 1, 1 << 60),
    ],
)
def test_lengths_that_cannot_be_are_refused_before_memory_is_taken(head: bytes) -> None:
    ours, theirs = pair()
    with ours, theirs:
        ours.sendall(head)
        with pytest.raises(WireError):
            receive(theirs)


def raised(error: Exception) -> Exception:
    """`error` with a traceback, as `except` gives it."""
    try:
        raise error
    except Exception as err:
        return err


OWN: dict[str, Callable[[], KvtapeError]] = {
    "ContextOverflow": lambda: ContextOverflow(9, 4, "too long"),
    "EngineFault": lambda: EngineFault(FatalClass.DECODE_FAILED, "it broke"),
    "SessionFatal": lambda: errors.SessionFatal(FatalClass.DEVICE_LOST, "gone"),
    "UnsupportedOperation": lambda: UnsupportedOperation("shift", "no rotation"),
}


@pytest.mark.parametrize("name", [n for n in errors.__all__ if n != "FatalClass"])
def test_every_error_of_kvtape_is_the_same_on_the_other_side(name: str) -> None:
    cls = getattr(errors, name)
    try:
        error = OWN[name]() if name in OWN else cls(f"a {name}")
    except TypeError:
        error = cls(1, 2, 3)
    back = unpack_error(there_and_back(pack_error(raised(error))))
    assert type(back) is cls
    assert str(back) == str(error)
    assert {k: v for k, v in vars(back).items() if k != "__notes__"} == vars(error)
    assert all(type(a) is type(vars(error)[k]) for k, a in vars(back).items() if k != "__notes__")
    assert "in raised" in back.__notes__[0]


@pytest.mark.parametrize(
    "error", [ValueError("a", 3), KeyError("k"), MemoryError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad")]
)
def test_errors_of_python_keep_class_and_arguments(error: Exception) -> None:
    back = unpack_error(there_and_back(pack_error(raised(error))))
    assert (type(back), back.args, str(back)) == (type(error), error.args, str(error))


def test_other_errors_become_the_nearest_known_one() -> None:
    class Odd(Exception):
        pass

    class Tight(MemoryError):
        pass

    odd = unpack_error(there_and_back(pack_error(raised(Odd("why")))))
    assert (type(odd), str(odd)) == (RuntimeError, "Odd: why")
    tight = unpack_error(there_and_back(pack_error(raised(Tight("no room")))))
    assert (type(tight), str(tight)) == (MemoryError, "no room")


@pytest.mark.parametrize("packed", [None, {}, {"class": "system", "args": [], "trace": ""}, {"class": "SystemExit"}])
def test_an_unreadable_error_is_damage(packed: object) -> None:
    with pytest.raises(WireError):
        unpack_error(packed)


def test_the_text_is_ascii_json() -> None:
    text, buffers = encode({"a": np.zeros(2, np.float32), "b": b"xy"})
    assert json.loads(text.decode("ascii"))
    assert [len(b) for b in buffers] == [8, 2]
