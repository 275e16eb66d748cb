"""What must hold of every geometry, engine and setting: sizes grow, the way back is exact, ideal is a lower bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.capacity.allocation import CacheSettings, EngineRule, largest_that_fits
from kvtape.capacity.engines import Sizing, engine_rule
from kvtape.capacity.errors import CapacityError
from kvtape.capacity.geometry import KVGeometry, LayerGroup, LayerKind
from kvtape.capacity.llama_rules import LLAMA_RULES
from kvtape.capacity.widths import BYTES_PER_BLOCK, KV_TYPES, row_bytes

per_token = st.builds(
    LayerGroup,
    kind=st.sampled_from([LayerKind.GLOBAL, LayerKind.WINDOWED, LayerKind.CHUNKED, LayerKind.SHARED]),
    count=st.integers(0, 30),
    k_elems=st.integers(1, 40).map(lambda n: 32 * n),
    v_elems=st.integers(1, 40).map(lambda n: 32 * n),
    window=st.integers(0, 3000),
    type_k=st.sampled_from(["f16", "f32", "bf16"]),
    type_v=st.sampled_from(["f16", "f32", "bf16"]),
)
states = st.builds(
    LayerGroup,
    kind=st.just(LayerKind.RECURRENT),
    count=st.integers(1, 30),
    k_elems=st.integers(0, 5000),
    v_elems=st.integers(0, 5000),
    type_k=st.just("f32"),
    type_v=st.just("f32"),
)
latents = st.builds(
    LayerGroup,
    kind=st.just(LayerKind.LATENT),
    count=st.integers(1, 30),
    k_elems=st.integers(1, 1000),
    v_elems=st.just(0),
    copy_elems=st.integers(0, 1000),
)
geometries = st.lists(st.one_of(per_token, per_token, latents, states), min_size=1, max_size=5).map(
    lambda groups: KVGeometry(tuple(groups))
)
all_settings = st.builds(
    CacheSettings,
    slots=st.integers(1, 5),
    unified=st.booleans(),
    n_batch=st.integers(1, 3000),
    n_ubatch=st.integers(1, 3000),
    flash_attention=st.booleans(),
    swa_full=st.booleans(),
    snapshots=st.integers(0, 3),
)
RULES: list[EngineRule] = [*LLAMA_RULES, engine_rule("openvino"), engine_rule("openvino-cb")]
rules = st.sampled_from(RULES)
contexts = st.integers(1, 30_000)


def for_rule(geometry: KVGeometry, rule: EngineRule) -> KVGeometry:
    if rule.name.startswith("openvino-cb"):
        return geometry.stored_as("u8", "u8")
    return geometry


@given(geometries, rules, all_settings, contexts, contexts)
def test_allocated_bytes_never_fall_and_cover_the_ideal(
    geometry: KVGeometry, rule: EngineRule, asked: CacheSettings, n: int, more: int
) -> None:
    sizing = Sizing(for_rule(geometry, rule), rule, asked)
    low, high = sorted((n, more))
    assert sizing.total_bytes(low) <= sizing.total_bytes(high)
    found = sizing.allocate(n)
    assert found.total_bytes == sizing.total_bytes(n)
    assert found.n_ctx >= n - (asked.slots if rule.context_step(asked) == 1 else 0)
    one_slot = CacheSettings(slots=1, flash_attention=asked.flash_attention, swa_full=True)
    if rule.name.startswith("llama"):
        assert geometry.bytes(n) <= Sizing(geometry, rule, one_slot).total_bytes(n)


@settings(max_examples=300)
@given(geometries, rules, all_settings, st.integers(0, 2**33), st.integers(0, 20_000))
def test_fit_is_the_largest_context(
    geometry: KVGeometry, rule: EngineRule, asked: CacheSettings, budget: int, limit: int
) -> None:
    sizing = Sizing(for_rule(geometry, rule), rule, asked)
    found = sizing.fit(limit)(budget)
    assert 0 <= found <= limit
    assert not found or sizing.peak_bytes(found) <= budget
    assert found == limit or sizing.peak_bytes(found + 1) > budget
    assert sizing.peak_bytes(found) >= sizing.total_bytes(found)


@given(geometries, rules, all_settings, contexts)
def test_a_step_of_the_context_is_allocated_as_its_upper_end(
    geometry: KVGeometry, rule: EngineRule, asked: CacheSettings, n: int
) -> None:
    sizing = Sizing(for_rule(geometry, rule), rule, asked)
    step = rule.context_step(asked)
    assert sizing.total_bytes(n) == sizing.total_bytes(-(-n // step) * step)


@given(geometries, st.integers(0, 2**33), st.integers(0, 20_000))
def test_the_ideal_inverse_is_the_largest_context(geometry: KVGeometry, budget: int, limit: int) -> None:
    found = geometry.inverse(budget, limit)
    assert not found or geometry.bytes(found) <= budget
    assert found == limit or geometry.bytes(found + 1) > budget


@given(geometries, st.integers(0, 5000))
def test_ideal_bytes_grow_by_the_marginal_cost(geometry: KVGeometry, n: int) -> None:
    assert geometry.bytes(n + 1) - geometry.bytes(n) == geometry.marginal_bytes(n)
    widest = max(g.window for g in geometry.groups)
    assert geometry.marginal_bytes(widest) == geometry.marginal_bytes()
    assert geometry.bytes(n, sequences=3) == 3 * geometry.bytes(n)


@given(st.lists(per_token, min_size=1, max_size=4), all_settings, contexts)
def test_window_0_is_the_dense_model_to_the_byte(groups: list[LayerGroup], asked: CacheSettings, n: int) -> None:
    own = [g for g in groups if g.kind is not LayerKind.SHARED]
    none = KVGeometry(tuple(replace(g, window=0, part="full") for g in own))
    dense = KVGeometry(tuple(replace(g, kind=LayerKind.GLOBAL, window=0, part="full") for g in own))
    assert none.bytes(n) == dense.bytes(n)
    for rule in RULES:
        assert Sizing(none, rule, asked).allocate(n) == Sizing(dense, rule, asked).allocate(n)


def test_the_search_takes_few_steps() -> None:
    asked: list[int] = []

    def size(n: int) -> int:
        asked.append(n)
        return 5 * n + 7 * min(n, 4096)

    assert largest_that_fits(size, 100_000, 131_072, 1) == (100_000 - 7 * 4096) // 5
    assert len(asked) <= 5
    asked.clear()
    assert largest_that_fits(size, 12 * 1000 + 3, 131_072, 1) == 1000
    assert len(asked) <= 40


def test_widths_of_32_elements() -> None:
    assert {t: row_bytes(t, 32) for t in KV_TYPES} == BYTES_PER_BLOCK
    assert BYTES_PER_BLOCK == {
        "bf16": 64, "f16": 64, "f32": 128, "iq4_nl": 18, "q4_0": 18, "q4_1": 20, "q5_0": 22, "q5_1": 24, "q8_0": 34,
    }  # fmt: skip
    assert row_bytes("f16", 7) == 14
    with pytest.raises(CapacityError, match="choose f16, bf16 or f32"):
        row_bytes("q8_0", 48)
    with pytest.raises(CapacityError, match=r"'q8' is unknown, did you mean 'q8_0'\? choose from bf16"):
        row_bytes("q8", 32)
