from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvtape.serve.text_stream import StopStrings, TextStream


def spell_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode("utf-8", "replace")


def spell_words(tokens: Sequence[int]) -> str:
    """As SentencePiece does: a space before each word but the first of what is spelled."""
    return " ".join(f"w{t}" for t in tokens)


@given(st.text(max_size=30))
def test_characters_come_whole(text: str) -> None:
    stream = TextStream(spell_bytes)
    parts = [stream.add(byte) for byte in text.encode()]
    assert "".join(parts) + stream.rest() == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text


@given(st.lists(st.integers(0, 255), max_size=30))
def test_no_byte_waits_for_ever(tokens: list[int]) -> None:
    stream = TextStream(spell_bytes)
    said = "".join(stream.add(t) for t in tokens)
    whole = spell_bytes(tokens)
    assert len(whole) - len(said) <= 4
    assert (said + stream.rest()).replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_spaces_between_tokens_are_kept() -> None:
    stream = TextStream(spell_words)
    assert [stream.add(t) for t in (1, 2, 3)] == ["w1", " w2", " w3"]


@given(st.lists(st.text("ab", max_size=4), max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), max_size=3))
def test_nothing_of_a_stop_string_is_sent(pieces: list[str], stops: list[str]) -> None:
    watch = StopStrings(stops)
    sent = ""
    for piece in pieces:
        sent += watch.add(piece)
    whole = "".join(pieces)
    found = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    if found:
        assert watch.hit
        assert sent == whole[: min(found)[1]]
    else:
        assert not watch.hit
        assert sent + watch.rest() == whole
        held = whole[len(sent) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_after_a_hit_nothing_more_comes() -> None:
    watch = StopStrings(["END"])
    assert [watch.add(p) for p in ("say E", "ND more", "x")] == ["say ", "", ""]
    assert watch.hit
