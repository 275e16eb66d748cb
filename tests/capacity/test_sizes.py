"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.capacity.errors import CapacityError
from kvtape.capacity.sizes import parse_size, size_text


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("7b", 7),
        ("6GiB", 6 * 2**30),
        ("512 MiB", 512 * 2**20),
        (" 1.5GB ", 1_500_000_000),
        ("0.7TiB", 7 * 2**40 // 10),
        ("2kb", 2000),
        ("0.3 B", 0),
    ],
)
def test_by_hand(text: str, n_bytes: int) -> None:
    assert parse_size(text) == n_bytes


WRONG = ["", "-5", "6 apples", "nan", "inf", "1e9", "1.GiB", ".5GiB", "GiB", "٣GiB", "1,5GB", "9" * 25]


@pytest.mark.parametrize("text", [*WRONG, "9" * 400 + ".5GiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(CapacityError, match="is no size; write bytes, or a number with KiB") as raised:
        parse_size(text)
    assert len(str(raised.value)) < 200


@given(st.integers(0, 2**60), st.sampled_from([("KiB", 2**10), ("MB", 10**6), ("TiB", 2**40), ("", 1)]))
def test_a_whole_number_of_units_is_exact(n: int, unit: tuple[str, int]) -> None:
    if n * unit[1] < 2**80:
        assert parse_size(f"{n}{unit[0]}") == parse_size(f"{n}.0{unit[0]}") == n * unit[1]


@given(st.integers(0, 2**62))
def test_what_is_shown_reads_back_to_a_hundredth(n: int) -> None:
    assert parse_size(size_text(n)) == pytest.approx(n, rel=0.006, abs=0.5)


@given(st.integers(0, 2**50))
def test_rounded_up_it_is_enough(n: int) -> None:
    told = parse_size(size_text(n, up=True))
    assert n <= told <= n + n // 100 + 11
