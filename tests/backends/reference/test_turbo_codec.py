"""The codec of turbo-quant: its formulas, its golden figures, and what it does to rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.reference.engines.turbo_codec import BLOCK_SIZES, CENTROIDS, BlockCodec, Coded, block_size
from kvtape.backends.reference.engines.turbo_quant import FLOORS

BITS = (3, 4)


def _rows(n: int, dim: int, seed: int = 0) -> np.ndarray:
    """Normal rows with channels of very different sizes, as keys have them."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((n, dim)) * rng.exponential(1, dim) ** 2).astype(np.float32)


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))


@pytest.mark.parametrize(
    ("kv_dim", "size"), [(192, 64), (256, 256), (320, 64), (384, 128), (1024, 256), (96, 32), (32, 32), (48, None)]
)
def test_the_block_is_the_largest_that_divides_the_row(kv_dim: int, size: int | None) -> None:
    assert block_size(kv_dim) == size


@pytest.mark.parametrize(("bits", "within"), [(3, 1e-3), (4, 2e-2)])
def test_centroids_are_those_of_lloyd_and_max(bits: int, within: float) -> None:
    """Each is the mean of a unit normal within its cell, whose edges are the midpoints, as far as they converged."""
    points = CENTROIDS[bits].astype(np.float64)
    assert len(points) == 2**bits
    np.testing.assert_array_equal(points, -points[::-1])
    edges = [-math.inf, *((points[1:] + points[:-1]) / 2), math.inf]
    for point, low, high in zip(points, edges, edges[1:], strict=False):
        mass = (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2
        mean = (math.exp(-low * low / 2) - math.exp(-high * high / 2)) / math.sqrt(2 * math.pi) / mass
        assert point == pytest.approx(mean, abs=within)


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_is_coded_as_the_formula_says(bits: int, size: int) -> None:
    """Against the dense matrix in float64: D H D / sqrt(d), times sqrt(d), nearest centroid."""
    rows = _rows(40, 2 * size)
    coded = BlockCodec(2 * size, size, bits).encode(rows)
    hadamard = np.ones((1, 1))
    while len(hadamard) < size:
        hadamard = np.kron([[1, 1], [1, -1]], hadamard)
    signs = np.diag([-1.0 if i * 2654435761 >> 16 & 1 else 1.0 for i in range(size)])
    blocks = rows.astype(np.float64).reshape(40, 2, size)
    norms = np.linalg.norm(blocks, axis=2)
    spread = blocks / norms[..., None] @ (signs @ hadamard @ signs)
    np.testing.assert_allclose(coded.norms, norms, rtol=1e-6)
    distance = np.abs(spread[..., None] - CENTROIDS[bits].astype(np.float64))
    want = distance.argmin(axis=3)
    got = _values(coded, bits, size)
    nearly_tied = np.abs(np.diff(np.sort(distance, axis=3)[..., :2], axis=3))[..., 0] < 1e-5
    assert nearly_tied.mean() < 1e-3
    np.testing.assert_array_equal(got[~nearly_tied], want[~nearly_tied])


def _values(coded: Coded, bits: int, size: int) -> np.ndarray:
    """Codes read bit by bit, the lowest first."""
    flags = np.unpackbits(coded.codes, axis=2, bitorder="little").reshape(*coded.codes.shape[:2], size, bits)
    return np.asarray(flags @ (1 << np.arange(bits)))


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_bytes_are_those_of_the_formula(bits: int, size: int) -> None:
    codec = BlockCodec(3 * size, size, bits)
    coded = codec.encode(_rows(5, 3 * size))
    assert codec.row_bytes == 3 * (4 + math.ceil(size * bits / 8))
    assert coded.norms.nbytes + coded.codes.nbytes == 5 * codec.row_bytes


def test_the_two_ratios_are_two_figures() -> None:
    codec = BlockCodec(256, 256, 4)
    assert 256 * 2 / codec.row_bytes == pytest.approx(3.9, abs=0.05)
    assert 256 * 4 / codec.row_bytes == pytest.approx(7.8, abs=0.05)


@pytest.mark.parametrize("size", BLOCK_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_cosines_keep_their_floor(bits: int, size: int) -> None:
    """Also against the theory: 1 - cosine^2 is the distortion of the quantiser, .009497 and .034548 (Max 1960)."""
    rows = _rows(3000, 4 * size, seed=bits)
    codec = BlockCodec(4 * size, size, bits)
    cosines = _cosines(codec.decode(codec.encode(rows)), rows)
    assert cosines.mean() >= FLOORS[bits]
    distortion = {3: 0.034548, 4: 0.009497}[bits]
    assert cosines.mean() == pytest.approx(math.sqrt(1 - distortion), abs=0.003)


def test_fewer_bits_would_not_reach_the_floor() -> None:
    rows = _rows(500, 256)
    codec = BlockCodec(256, 256, 3)
    assert _cosines(codec.decode(codec.encode(rows)), rows).mean() < FLOORS[4]


@settings(max_examples=40, deadline=None)
@given(
    bits=st.sampled_from(BITS),
    size=st.sampled_from(BLOCK_SIZES),
    n=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    scale=st.integers(-40, 40),
)
def test_a_row_is_coded_alone(bits: int, size: int, n: int, seed: int, scale: int) -> None:
    """Its codes depend on the row alone; a power of two moves into the norm and changes no code."""
    rows, codec = _rows(n, 2 * size, seed), BlockCodec(2 * size, size, bits)
    coded, scaled = codec.encode(rows), codec.encode(np.ldexp(rows, scale))
    np.testing.assert_array_equal(scaled.codes, coded.codes)
    np.testing.assert_array_equal(scaled.norms, np.ldexp(coded.norms, scale))
    decoded = codec.decode(coded)
    for i in range(n):
        alone = codec.encode(rows[i : i + 1])
        np.testing.assert_array_equal(alone.norms[0], coded.norms[i])
        np.testing.assert_array_equal(alone.codes[0], coded.codes[i])
        np.testing.assert_array_equal(codec.decode(alone)[0], decoded[i])


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from(BITS), size=st.sampled_from(BLOCK_SIZES), seed=st.integers(0, 2**16))
def test_any_codes_are_read_as_they_were_written(bits: int, size: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, (3, 2, size)).astype(np.uint32)
    codec = BlockCodec(2 * size, size, bits)
    packed = codec._pack(values)
    np.testing.assert_array_equal(codec._unpack(packed), values)
    np.testing.assert_array_equal(_values(Coded(np.ones((3, 2), np.float32), packed), bits, size), values)


def test_rows_of_zeros_stay_zeros() -> None:
    codec = BlockCodec(64, 32, 4)
    np.testing.assert_array_equal(codec.decode(codec.encode(np.zeros((2, 64), np.float32))), 0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_what_cannot_be_coded_is_refused(bad: float) -> None:
    rows = np.ones((2, 64), np.float32)
    rows[1, 5] = bad
    with pytest.raises(ValueError, match="cannot be encoded"):
        BlockCodec(64, 64, 4).encode(rows)
