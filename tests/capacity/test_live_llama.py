"""Tiny models of many kinds are opened in llama.cpp with many settings; the sizes it logs are ours."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.llama.native import NativeModel
from kvtape.capacity.allocation import CacheSettings
from kvtape.capacity.engines import Sizing, engine_rule
from kvtape.capacity.layers import model_kv
from kvtape.capacity.metadata import metadata_from_gguf
from support.logged_sizes import LoggedCache, logged_caches
from support.tiny_gemma4 import write_tiny_gemma4
from support.tiny_gguf import write_tiny
from support.tiny_latent import write_tiny_latent

_WIDE: dict[str, Any] = {"n_embd": 256, "n_head": 4, "n_head_kv": 2, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"arch": "llama", **_WIDE},
    "llama with a window key": {"arch": "llama", "window": 64, **_WIDE},
    "qwen2": {"arch": "qwen2", **_WIDE},
    "qwen3": {"arch": "qwen3", **_WIDE},
    "gemma2": {"arch": "gemma2", **_WIDE},
    "gemma2, window 300": {"arch": "gemma2", "window": 300, **_WIDE},
    "gemma3": {"arch": "gemma3", **_WIDE},
    "gemma3, period 3": {"arch": "gemma3", "window_period": 3, **_WIDE},
    "gemma3 without a window": {"arch": "gemma3", "window": 0, **_WIDE},
    "gpt-oss": {"arch": "gpt-oss", **_WIDE},
    "mamba": {"arch": "mamba", "n_embd": 256},
    "lfm2": {"arch": "lfm2", "kv_heads": (0, 2, 0, 4), "n_embd": 256, "n_head": 4, "head_dim": 64},
    "lfm2, windowed": {"arch": "lfm2", "kv_heads": (0, 2, 0, 2), "window": 64, **_WIDE},
    "gemma4": {"shared": 3},
    "gemma4 without shared layers": {"shared": 0},
    "latent": {"absorbed": True},
    "latent, expanded": {"absorbed": False},
}
CONTEXTS = (4, 255, 257, 1000, 3000)
SLOTS = ((1, False), (2, False), (3, False), (3, True), (4, True))
TYPES = (("f32", "f32"), ("f16", "bf16"), ("q8_0", "q4_0"), ("q5_1", "q5_0"), ("iq4_nl", "q4_1"))

_folder = tempfile.TemporaryDirectory(prefix="kvtape-sizes-")


@functools.cache
def model_file(name: str) -> Path:
    path = Path(_folder.name) / f"{name}.gguf"
    shape = MODELS[name]
    if "shared" in shape:
        return write_tiny_gemma4(path, **shape)
    return write_tiny_latent(path, **shape) if "absorbed" in shape else write_tiny(path, **shape)


@pytest.fixture(scope="module", params=list(MODELS))
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[str, NativeModel]]:
    model = NativeModel(str(model_file(request.param)))
    yield request.param, model
    model.close()


def ours(name: str, n_ctx: int, settings: CacheSettings, k: str = "f16", v: str = "f16") -> list[LoggedCache]:
    model = model_kv(*metadata_from_gguf(model_file(name)))
    sized = Sizing(model.geometry.stored_as(k, v), engine_rule("llama.cpp"), settings).allocate(n_ctx)
    return [
        LoggedCache(
            None if part.part == "recurrent" else part.layers,
            part.cells,
            part.streams,
            f"{part.k_bytes / 2**20:.2f}",
            f"{part.v_bytes / 2**20:.2f}",
        )
        for part in sized.parts
    ]


def test_slots_contexts_and_micro_batches(loaded: tuple[str, NativeModel]) -> None:
    name, model = loaded
    asked = (*product(CONTEXTS, SLOTS, (512,)), *product((257, 3000), SLOTS, (32,)))
    for n_ctx, (slots, unified), n_ubatch in asked:
        settings = CacheSettings(slots=slots, unified=unified, n_ubatch=n_ubatch, flash_attention=False)
        found = logged_caches(model, n_ctx, settings, "f16", "f16")
        assert found, "the engine logged no cache"
        assert ours(name, n_ctx, settings) == found, (n_ctx, settings)


def test_whole_windows_and_batches(loaded: tuple[str, NativeModel]) -> None:
    name, model = loaded
    for n_ctx, swa_full, n_batch in product((700, 2000), (True, False), (64, 2048)):
        settings = CacheSettings(slots=2, swa_full=swa_full, n_batch=n_batch, flash_attention=False)
        assert ours(name, n_ctx, settings) == logged_caches(model, n_ctx, settings, "f16", "f16"), (n_ctx, settings)


@pytest.mark.parametrize(("k", "v"), TYPES)
def test_storage_types(loaded: tuple[str, NativeModel], k: str, v: str) -> None:
    name, model = loaded
    settings = CacheSettings(flash_attention=True)
    v = k if name == "latent" else v  # the engine refuses two types where there are no values
    assert ours(name, 1500, settings, k, v) == logged_caches(model, 1500, settings, k, v)


def test_values_are_padded_to_the_widest_layer_without_flash_attention(loaded: tuple[str, NativeModel]) -> None:
    """Layers of 2 and of 4 KV heads: only without flash attention do the narrow ones get the width of the wide."""
    name, model = loaded
    for flash in (False, True):
        settings = CacheSettings(flash_attention=flash)
        assert ours(name, 2000, settings) == logged_caches(model, 2000, settings, "f16", "f16")
    if name == "lfm2":
        without, with_flash = (ours(name, 2000, CacheSettings(flash_attention=flash))[0] for flash in (False, True))
        assert float(without.v_mib) * 3 == pytest.approx(float(with_flash.v_mib) * 4, rel=0.02)
        assert without.k_mib == with_flash.k_mib
