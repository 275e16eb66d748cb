"""Rotation of keys, and finding its convention in keys that a known one produced."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.openvino.rope import PROBE_POSITIONS, LayerRotation, Rotation, find_rotation, rotate

CONVENTIONS = [
    LayerRotation("interleaved", 32, 10000.0),
    LayerRotation("halves", 32, 10000.0),
    LayerRotation("halves", 32, 1e6),
    LayerRotation("interleaved", 16, 1e5),
    LayerRotation("halves", 16, 1e5),
]
conventions = st.sampled_from(CONVENTIONS)


def keys(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, 2, 32)).astype(np.float32)


def alone(how: LayerRotation, seed: int = 0) -> np.ndarray:
    """One layer's keys of one token at the probe's positions."""
    start = np.repeat(keys(1, seed), len(PROBE_POSITIONS), axis=0)
    return rotate(start, np.array(PROBE_POSITIONS), how)


@given(conventions, st.integers(-4000, 4000), st.integers(-4000, 4000))
def test_rotations_add_up_and_keep_length(how: LayerRotation, a: int, b: int) -> None:
    rows = keys(3)
    once = rotate(rows, np.full(3, a + b), how)
    twice = rotate(rotate(rows, np.full(3, a), how), np.full(3, b), how)
    np.testing.assert_allclose(once, twice, atol=2e-6)
    np.testing.assert_allclose(np.linalg.norm(once, axis=-1), np.linalg.norm(rows, axis=-1), rtol=1e-5)
    np.testing.assert_array_equal(once[..., how.dims :], rows[..., how.dims :])


@pytest.mark.parametrize("pairs", ["interleaved", "halves"])
def test_a_rotation_turns_pairs_as_complex_numbers_turn(pairs: str) -> None:
    how = LayerRotation(pairs, 32, 10000.0)  # type: ignore[arg-type]
    rows = keys(1)[0, 0].astype(np.float64)
    pair = rows.reshape(16, 2) if pairs == "interleaved" else rows.reshape(2, 16).T
    turned = (pair[:, 0] + 1j * pair[:, 1]) * np.exp(1j * 7 * 10000.0 ** (-np.arange(16) / 16))
    want = np.stack([turned.real, turned.imag], axis=-1)
    want = want.reshape(32) if pairs == "interleaved" else want.T.reshape(32)
    np.testing.assert_allclose(rotate(keys(1), np.array([7]), how)[0, 0], want, atol=1e-6)


def test_rows_that_do_not_move_keep_every_bit() -> None:
    rotation = Rotation((CONVENTIONS[0], CONVENTIONS[1]))
    rows = np.stack([keys(4), keys(4, 1)])
    moved = rotation.apply(rows, np.array([0, 3, 0, -2]))
    np.testing.assert_array_equal(moved[:, [0, 2]], rows[:, [0, 2]])
    assert not np.isclose(moved[:, [1, 3]], rows[:, [1, 3]]).all()
    assert rotation.apply(rows, np.zeros(4, np.int64)) is rows


@given(st.lists(conventions.filter(lambda h: h.dims == 32), min_size=1, max_size=4))
def test_the_convention_of_every_layer_is_found(layers: list[LayerRotation]) -> None:
    rows = np.stack([alone(how, seed) for seed, how in enumerate(layers)])
    assert find_rotation(rows, PROBE_POSITIONS, 32, (1e6, 10000.0)) == Rotation(tuple(layers))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda rows: rows * np.linspace(1, 1.1, len(rows), dtype=np.float32)[:, None, None],
        lambda rows: np.concatenate([rows[:3], rotate(rows[3:], np.array([1]), CONVENTIONS[0])]),
        lambda rows: np.zeros_like(rows),
        lambda rows: rows * np.float32(np.nan),
    ],
    ids=["scaled", "one position off", "no key", "not a number"],
)
def test_keys_that_are_no_plain_rotation_have_none(spoil: object) -> None:
    rows = np.stack([alone(CONVENTIONS[0]), spoil(alone(CONVENTIONS[0], 1))])  # type: ignore[operator]
    found = find_rotation(rows, PROBE_POSITIONS, 32, (10000.0,))
    assert isinstance(found, str)
    assert "layer 1" in found


written = st.lists(st.floats(1e-4, 1.0), min_size=8, max_size=8, unique=True).map(lambda turns: (1.0, *turns))


@given(written, st.sampled_from(["interleaved", "halves"]), st.integers(0, 99))
def test_frequencies_that_a_model_has_written_down_are_found(turns: tuple[float, ...], pairs: str, seed: int) -> None:
    how = LayerRotation(pairs, 18, 0.0, turns)  # type: ignore[arg-type]
    found = find_rotation(alone(how, seed)[None], PROBE_POSITIONS, 18, (10000.0,), frequencies=turns)
    assert found == Rotation((how,))


def test_what_is_written_down_is_taken_before_a_base_that_explains_the_keys_as_well() -> None:
    plain = LayerRotation("halves", 32, 10000.0)
    turns = tuple(float(t) for t in plain.turns.astype(np.float32))
    found = find_rotation(alone(plain)[None], PROBE_POSITIONS, 32, (10000.0,), frequencies=turns)
    assert isinstance(found, Rotation)
    assert found.layers[0].frequencies == turns


def test_frequencies_that_do_not_explain_the_keys_leave_the_bases() -> None:
    plain = LayerRotation("halves", 32, 10000.0)
    found = find_rotation(alone(plain)[None], PROBE_POSITIONS, 32, (10000.0,), frequencies=(0.5,) * 16)
    assert found == Rotation((plain,))
