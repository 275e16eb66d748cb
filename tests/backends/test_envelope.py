"""The envelope refuses every damaged or foreign state before an engine sees it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import StateRejected

HEADER = {"engine": "llama", "fingerprint": "f", "n_tokens": 3}


@given(st.binary(max_size=200))
def test_round_trip(payload: bytes) -> None:
    assert unwrap(wrap(HEADER, payload), HEADER) == (HEADER, payload)


@given(st.binary(max_size=60), st.data())
def test_every_flipped_bit_is_refused(payload: bytes, data: st.DataObject) -> None:
    blob = bytearray(wrap(HEADER, payload))
    blob[data.draw(st.integers(0, len(blob) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(StateRejected):
        unwrap(bytes(blob), {})


@given(st.binary(max_size=60), st.data())
def test_every_cut_is_refused(payload: bytes, data: st.DataObject) -> None:
    blob = wrap(HEADER, payload)
    with pytest.raises(StateRejected):
        unwrap(blob[: data.draw(st.integers(0, len(blob) - 1))], {})


def test_another_model_is_named() -> None:
    with pytest.raises(StateRejected, match="fingerprint 'f', this session needs 'g'"):
        unwrap(wrap(HEADER, b"x"), {"fingerprint": "g"})
