"""The layer profile: golden numbers, and what must hold for every profile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.capacity.errors import CapacityError
from kvtape.capacity.geometry import KVGeometry, LayerGroup, LayerKind
from kvtape.capacity.profile import LayerKVProfile

KIB, GIB = 2**10, 2**30
GOLDEN = LayerKVProfile(7, 35, 512, 168 * KIB // 42)

profiles = st.builds(
    LayerKVProfile,
    global_layers=st.integers(1, 80),
    windowed_layers=st.integers(0, 80),
    window=st.integers(-1, 5000),
    per_layer_bytes=st.integers(1, 2**16),
)
budgets = st.integers(0, 2**42)
contexts = st.integers(0, 2**20)


def test_golden_gemma_shape() -> None:
    """42 layers, 7 global, window 512, 168 KiB a token dense."""
    assert GOLDEN.dense_bytes == 168 * KIB
    assert round(GOLDEN.bytes(131072) / GIB, 2) == 3.57
    assert LayerKVProfile(42, 0, 0, 4 * KIB).bytes(131072) / GIB == 21
    budget = 10_608 * GOLDEN.dense_bytes
    assert LayerKVProfile(42, 0, 0, 4 * KIB).inverse(budget) == 10_608
    assert GOLDEN.inverse(budget) == 61_088


def test_golden_28672_bytes_a_token() -> None:
    assert LayerKVProfile(28, 0, 0, 2 * (128 + 128) * 2).bytes(1) == 28_672


@given(profiles, contexts)
def test_monotone_and_never_above_dense(profile: LayerKVProfile, n_ctx: int) -> None:
    assert profile.bytes(n_ctx) < profile.bytes(n_ctx + 1) <= profile.bytes(n_ctx) + profile.dense_bytes
    assert profile.bytes(n_ctx) <= profile.dense_bytes * n_ctx


@given(profiles, budgets)
def test_inverse_is_the_largest_context_that_fits(profile: LayerKVProfile, budget: int) -> None:
    tokens = profile.inverse(budget)
    assert profile.bytes(tokens) <= budget < profile.bytes(tokens + 1)


@given(profiles)
def test_continuous_at_the_knee(profile: LayerKVProfile) -> None:
    knee = max(1, profile.window)
    dense, left, right = profile.dense_bytes, profile.bytes(knee - 1), profile.bytes(knee + 1)
    assert profile.bytes(knee) - left == dense
    assert right - profile.bytes(knee) == profile.marginal_bytes()
    assert profile.inverse(profile.bytes(knee)) == knee


@given(profiles, contexts, budgets)
def test_no_window_is_the_dense_path_to_the_byte(profile: LayerKVProfile, n_ctx: int, budget: int) -> None:
    layers = profile.global_layers + profile.windowed_layers
    dense = LayerKVProfile(layers, 0, 0, profile.per_layer_bytes)
    none = LayerKVProfile(profile.global_layers, profile.windowed_layers, 0, profile.per_layer_bytes)
    assert none.bytes(n_ctx) == dense.bytes(n_ctx) == dense.dense_bytes * n_ctx
    assert none.inverse(budget) == dense.inverse(budget) == budget // dense.dense_bytes
    assert none.marginal_bytes() == dense.marginal_bytes()


@given(profiles, contexts, budgets, st.integers(0, 2**20))
def test_the_general_geometry_says_the_same(profile: LayerKVProfile, n_ctx: int, budget: int, limit: int) -> None:
    """Bytes of a row split into keys and values of one f32 element each 4 bytes: rows of p elements, K f32, no V."""
    groups = (
        LayerGroup(LayerKind.GLOBAL, profile.global_layers, profile.per_layer_bytes, 0, type_k="f32"),
        LayerGroup(
            LayerKind.WINDOWED, profile.windowed_layers, profile.per_layer_bytes, 0, window=profile.window, type_k="f32"
        ),
    )
    geometry = KVGeometry(groups)
    assert geometry.bytes(n_ctx) == 4 * profile.bytes(n_ctx)
    assert geometry.marginal_bytes() == 4 * profile.marginal_bytes()
    assert geometry.inverse(4 * budget, limit) == profile.inverse(budget, limit)


def test_nothing_grows_without_a_global_layer() -> None:
    windows = LayerKVProfile(0, 3, 100, 10)
    assert windows.inverse(2999) == 99
    assert windows.inverse(3001, limit=8192) == 8192
    with pytest.raises(CapacityError, match="give the model's limit"):
        windows.inverse(3001)
    assert windows.marginal_bytes() == 0


@pytest.mark.parametrize("sizes", [(0, 0, 5, 1), (-1, 3, 5, 1), (1, 1, 5, 0)])
def test_impossible_profiles(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(CapacityError):
        LayerKVProfile(*sizes)
