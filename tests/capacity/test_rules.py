"""Engine rules by version: the same settings through llama.cpp's history, and OpenVINO's two caches."""

from __future__ import annotations

import pytest

from kvtape.capacity.allocation import Allocation, CacheSettings
from kvtape.capacity.engines import Sizing, engine_rule
from kvtape.capacity.errors import CapacityError
from kvtape.capacity.geometry import KVGeometry, LayerGroup, LayerKind
from kvtape.capacity.layers import model_kv
from kvtape.capacity.llama_rules import LLAMA_RULES
from kvtape.capacity.metadata import Metadata
from support.known_models import keys_of

MIB = 2**20


def allocated(
    model: str, n_ctx: int, engine: str = "llama.cpp", types: tuple[str, str] = ("f16", "f16"), **settings: object
) -> Allocation:
    geometry = model_kv(Metadata(keys_of(model), model)).geometry.stored_as(*types)
    return Sizing(geometry, engine_rule(engine), CacheSettings(**settings)).allocate(n_ctx)  # type: ignore[arg-type]


def windowed_cells(engine: str, **settings: object) -> int:
    parts = {p.part: p for p in allocated("gemma-3-27b", 32768, engine, **settings).parts}
    return parts["swa"].cells if "swa" in parts else parts["full"].cells


@pytest.mark.parametrize(
    ("engine", "one", "three_unified"),
    [
        ("llama.cpp@b5400", 32768, 32768),
        ("llama.cpp@b5429", 1024 + 2048, 3 * 1024 + 2048),
        ("llama.cpp@b5553", 1024 + 2048, 3 * 1024 + 2048),
        ("llama.cpp@b5554", 1024 + 256, 3 * 1024 + 256),
        ("llama.cpp@b5913", 1024 + 256, 3 * 1024 + 256),
        ("llama.cpp@b6975", 1024 + 256, 3 * 1024 + 256),
        ("llama.cpp", 1024 + 256, 3 * 1024 + 256),
    ],
)
def test_the_windowed_cells_of_every_era(engine: str, one: int, three_unified: int) -> None:
    assert windowed_cells(engine, n_ubatch=256) == one
    assert windowed_cells(engine, n_ubatch=256, slots=3, unified=True) == three_unified


def test_separate_slots_had_no_caches_of_their_own_before_b5913() -> None:
    old, new = (windowed_cells(f"llama.cpp@b{b}", n_ubatch=256, slots=3) for b in (5912, 5913))
    assert (old, new) == (3 * 1024 + 256, 1024 + 256)
    assert {p.streams for p in allocated("gemma-3-27b", 9000, "llama.cpp@b5912", slots=3).parts} == {1}


def test_padding_came_inside_then_went_then_came_outside() -> None:
    """An odd micro-batch: 1024 + 100 cells, padded to 256, left alone, padded again; the context alike."""
    cells = {b: windowed_cells(f"llama.cpp@b{b}", n_ubatch=100) for b in (6000, 6900, 6975)}
    assert cells == {6000: 1280, 6900: 1124, 6975: 1280}
    contexts = {b: allocated("Llama-2-7B", 1000, f"llama.cpp@b{b}").n_ctx for b in (6000, 6900, 6975)}
    assert contexts == {6000: 1024, 6900: 1000, 6975: 1024}
    assert allocated("Llama-2-7B", 1000, "llama.cpp@b6000", flash_attention=False).n_ctx == 1000 + 24
    assert allocated("Llama-2-7B", 990, "llama.cpp@b6000", flash_attention=False).n_ctx == 992


def test_hybrid_models_before_and_after_february_2026() -> None:
    before, after = (allocated("Qwen3.5-9B", 8192, f"llama.cpp@b{b}", slots=4) for b in (8000, 8018))
    assert [(p.part, p.cells, p.streams) for p in before.parts] == [("full", 8192, 4), ("recurrent", 4, 1)]
    assert [(p.part, p.cells, p.streams) for p in after.parts] == [("full", 2048, 4), ("recurrent", 4, 1)]


def test_latent_models_before_and_after_january_2026() -> None:
    """DeepSeek-V3: 576 elements a row of keys; before #19067 512 of them a second time, as values of their type."""
    model, types = "DeepSeek-V3/R1 MLA (fork)", ("f16", "q8_0")
    before, after = (allocated(model, 4096, f"llama.cpp@b{b}", types).parts[0] for b in (7824, 7825))
    assert (before.k_bytes, before.v_bytes) == (61 * 4096 * 576 * 2, 61 * 4096 * 512 * 34 // 32)
    assert (after.k_bytes, after.v_bytes) == (61 * 4096 * 576 * 2, 0)
    assert engine_rule("llama.cpp@b7824").text.count("copy") == 1
    assert engine_rule("llama.cpp").text.count("copy") == 0


@pytest.mark.parametrize(("n_ctx", "cells"), [(1, 256), (255, 256), (257, 512), (5000, 5120)])
def test_odd_contexts_are_rounded_up(n_ctx: int, cells: int) -> None:
    assert allocated("Llama-2-7B", n_ctx).parts[0].cells == cells


@pytest.mark.parametrize(("slots", "cells", "n_ctx", "mib"), [(3, 512, 1536, 27.0), (4, 256, 1024, 18.0)])
def test_a_context_that_its_slots_do_not_divide(slots: int, cells: int, n_ctx: int, mib: float) -> None:
    found = allocated("gemma-3-270m", 1024, slots=slots)
    assert {(p.cells, p.streams) for p in found.parts} == {(cells, slots)}
    assert (found.n_ctx, found.n_ctx_seq, found.total_bytes / MIB) == (n_ctx, cells, mib)


def test_hybrid_state_counts_sequences_not_tokens() -> None:
    """Qwen3.5-9B with 4 sequences: 8 layers of cache and 201 MiB of state, at any context."""
    for n_ctx in (1024, 131072):
        found = allocated("Qwen3.5-9B", n_ctx, slots=4, unified=True)
        assert [(p.part, p.layers) for p in found.parts] == [("full", 8), ("recurrent", 24)]
        assert found.parts[1].total_bytes / MIB == 201.0
    assert allocated("Qwen3.5-9B", 1024, slots=8).parts[1].total_bytes / MIB == 402.0


def test_whole_windows_cost_eight_times() -> None:
    """gemma-4-31b at 32768: a runtime without windows, or swa_full, against windowed cells."""
    whole = allocated("gemma-4-31b", 32768, swa_full=True).total_bytes
    assert whole == allocated("gemma-4-31b", 32768, "llama.cpp@b5000").total_bytes
    assert whole / allocated("gemma-4-31b", 32768).total_bytes > 6


def test_values_without_flash_attention() -> None:
    full, windowed = allocated("gemma-4-E4B", 4096, swa_full=True, flash_attention=False).parts
    assert full.k_bytes == full.v_bytes
    assert windowed.v_bytes == 2 * windowed.k_bytes
    for model in ("Llama-2-7B", "DeepSeek-V3/R1 MLA (fork)"):
        with pytest.raises(CapacityError, match="without flash attention"):
            allocated(model, 512, types=("f16", "q8_0"), flash_attention=False)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("llama.cpp", LLAMA_RULES[-1].name),
        ("llama.cpp@b9849", "llama.cpp@b8018"),
        ("llama.cpp@9849", "llama.cpp@b8018"),
        ("llama.cpp@b5553", "llama.cpp@b5429"),
        ("llama.cpp@b1", "llama.cpp@b0"),
        ("openvino", "openvino@2026.4"),
        ("openvino-cb@2026.4.1", "openvino-cb@2026.4"),
    ],
)
def test_an_engine_names_its_rule(spec: str, name: str) -> None:
    rule = engine_rule(spec)
    assert rule.name == name
    assert rule.text


@pytest.mark.parametrize("spec", ["ollama", "llama", "llama.cpp@", "llama.cpp@main", "openvino@", ""])
def test_unknown_engines_are_refused(spec: str) -> None:
    with pytest.raises(CapacityError, match=r"llama\.cpp"):
        engine_rule(spec)


def test_openvino_keeps_every_row() -> None:
    found = allocated("gemma-3-270m", 1000, "openvino", slots=2)
    assert [(p.part, p.layers, p.cells, p.streams) for p in found.parts] == [("full", 18, 500, 2)]
    assert found.total_bytes == 18 * 1000 * 2 * 256 * 2


def test_openvino_scales() -> None:
    """SmolLM2-135M: 30 layers of 3 heads of 64; the pool's figure was measured from its own metrics."""
    geometry = KVGeometry((LayerGroup(LayerKind.GLOBAL, 30, 192, 192, heads=3),)).stored_as("u8", "u8")
    per_token = {e: Sizing(geometry, engine_rule(e), CacheSettings()).total_bytes(32) / 32 for e in ENGINE_BYTES}
    assert per_token == ENGINE_BYTES
    pool = Sizing(geometry, engine_rule("openvino-cb"), CacheSettings())
    assert [pool.allocate(n).parts[0].cells for n in (1, 32, 33)] == [32, 32, 64]
    with pytest.raises(CapacityError, match="does not keep a cache as 'q8_0'"):
        Sizing(geometry.stored_as("q8_0", "f16"), engine_rule("openvino"), CacheSettings())


ENGINE_BYTES = {"openvino": 12_960, "openvino-cb": 13_680}


@pytest.mark.parametrize("wrong", [{"slots": 0}, {"n_ubatch": 0}, {"n_batch": -1}, {"snapshots": -1}])
def test_impossible_settings(wrong: dict[str, int]) -> None:
    with pytest.raises(CapacityError, match="the least is"):
        CacheSettings(**wrong)  # type: ignore[arg-type]
    with pytest.raises(CapacityError, match="256 at most"):
        allocated("Llama-2-7B", 512, slots=257)
    with pytest.raises(CapacityError, match="the least is 1"):
        allocated("Llama-2-7B", 0)
