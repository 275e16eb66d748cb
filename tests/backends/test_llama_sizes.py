"""Bytes of a llama.cpp session against the engine's own state and log; what does not fit is refused, not loaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvtape.backends import fit
from kvtape.backends.errors import UsageError
from kvtape.backends.fit import DoesNotFit
from kvtape.backends.llama.context import LIVE
from kvtape.backends.llama.engine import LlamaEngine
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import SessionConfig
from kvtape.capacity.errors import CapacityError
from support.llama_tiny import engine, model_file, session, tokens

_CELL = 12
"""Position, and the list of one sequence, that a saved state has for every cell."""


def grown(backend: LlamaBackend, n: int, at: int) -> tuple[int, int]:
    """How much `n` more tokens add to `kv_bytes` and to the state that the engine would save."""
    before = backend.kv_bytes()["resident"], backend._context.sequence_size(LIVE)
    backend.prefill(tokens(n), at)
    after = backend.kv_bytes()["resident"], backend._context.sequence_size(LIVE)
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize(
    ("arch", "caches", "more"),
    [
        ("llama", 1, {}),
        ("qwen3", 1, {}),
        ("llama", 1, {"config": {"kv_type_k": "f16", "kv_type_v": "bf16", "flash_attention": "on"}}),
        ("gemma2", 2, {}),
        ("gemma3", 2, {}),
        ("gpt-oss", 2, {}),
        ("lfm2", 1, {}),
    ],
)
def test_rows_weigh_what_the_engine_saves(arch: str, caches: int, more: dict[str, Any]) -> None:
    """The window of the windowed ones is 64: until it is full both caches grow, then one alone."""
    backend = session(arch, **more)
    assert backend.kv_bytes()["resident"] == 0
    backend.prefill(tokens(20), 0)
    ours, saved = grown(backend, 30, 20)
    assert ours == saved - caches * 30 * _CELL > 0
    backend.prefill(tokens(30), 50)
    ours, saved = grown(backend, 40, 80)
    assert ours == saved - 40 * _CELL > 0


def test_a_state_weighs_the_same_at_any_length() -> None:
    backend = session("mamba")
    backend.prefill(tokens(10), 0)
    first, saved = backend.kv_bytes()["resident"], backend._context.sequence_size(LIVE)
    assert 0.9 * saved < first < saved
    backend.prefill(tokens(50), 10)
    assert backend.kv_bytes()["resident"] == first


@pytest.mark.parametrize("arch", ["llama", "gemma2", "gemma3", "gpt-oss", "lfm2", "mamba"])
@pytest.mark.parametrize("n_ctx", [100, 700])
def test_allocated_is_what_the_engine_logs(arch: str, n_ctx: int) -> None:
    """To the byte by the geometry, which agrees with the rounded log."""
    backend = session(arch, config={"n_ctx": n_ctx, "chunk": 64})
    ours, logged = backend.kv_bytes()["allocated"], backend._context.words.allocated_bytes
    assert abs(ours - logged) <= 3 * 0.005 * 2**20


def test_events_bear_the_bytes_of_the_rows() -> None:
    backend = session("llama")
    backend.prefill(tokens(40), 0)
    each = backend.kv_bytes()["resident"] // 40
    backend.evict(10, 20)
    assert backend.kv_bytes()["resident"] == 30 * each == 30 * 2 * 2 * 32 * 4


# -- the context that a memory holds ---------------------------------------------------------------------------------


def opened(arch: str, n_ctx: int, **options: str) -> LlamaBackend:
    return engine(arch).open(SessionConfig(n_ctx=n_ctx, kv_type_k="f32", kv_type_v="f32", options=options))


def test_a_memory_gives_the_largest_context_that_fits() -> None:
    """512 bytes a token, one more padding unit for scratch rows, 2 heads of 128 attention weights a cell."""
    weights = engine("llama")._shape.weights_bytes
    per_cell = 2 * 2 * 32 * 4 + 128 * 2 * 4
    enough = int((weights + per_cell * (1024 + 256)) / 0.9) + 1
    assert opened("llama", 4096, memory=str(enough)).n_ctx == 1024
    assert opened("llama", 4096, memory=str(enough - 8)).n_ctx == 768
    assert opened("llama", 512, memory=str(enough)).n_ctx == 512
    assert opened("llama", 4096, memory="auto").n_ctx == 4096


def test_windowed_layers_leave_room_for_more() -> None:
    weights = engine("gemma3")._shape.weights_bytes
    memory = str(int((weights + 4 * 2**20) / 0.9))
    windowed = opened("gemma3", 2**17, memory=memory).n_ctx
    whole = opened("gemma3", 2**17, memory=memory, swa_full="yes").n_ctx
    assert windowed > 1.5 * whole


def test_a_memory_that_holds_nothing_is_refused_with_both_numbers() -> None:
    with pytest.raises(DoesNotFit, match=r"memory of 100\.00 KiB leaves 0 B beside the weights.*give at least"):
        opened("llama", 512, memory="100KiB")
    with pytest.raises(UsageError, match=r"memory=much: 'much' is no size.*or auto, or off"):
        opened("llama", 512, memory="much")


def test_more_than_the_machine_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        DoesNotFit, match=r"a context of 16777216 tokens needs .* of cache .* are free; ask for a smaller"
    ):
        opened("llama", 2**24)
    loaded = engine("llama")
    monkeypatch.setattr(fit, "free_memory", lambda: 2**20)
    with pytest.raises(DoesNotFit, match=r"beside .* of weights, and 1\.00 MiB are free"):
        loaded.open(SessionConfig(n_ctx=512))


def test_weights_that_do_not_fit_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by `load` nor by the check before it; the library is never asked."""
    from kvtape.backends.llama import engine as module

    path = model_file("llama")
    monkeypatch.setattr(module, "NativeModel", lambda _: pytest.fail("the model was loaded"))
    LlamaEngine.check(path, SessionConfig(n_ctx=512))
    monkeypatch.setattr(fit, "free_memory", lambda: 1000)
    for refused in (lambda: LlamaEngine.load(path), lambda: LlamaEngine.check(path, SessionConfig(n_ctx=512))):
        with pytest.raises(DoesNotFit, match=r"its weights need .* and 1000 B are free"):
            refused()


def test_a_system_that_does_not_say_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions open, as long as the whole machine could hold them; `auto` has no answer."""

    def unknown() -> int:
        raise CapacityError("this system does not say")

    monkeypatch.setattr(fit, "free_memory", unknown)
    monkeypatch.setattr(fit, "whole_memory", lambda: 2**30)
    assert opened("llama", 512).n_ctx == 512
    with pytest.raises(DoesNotFit, match="are free; ask for a smaller"):
        opened("llama", 2**24)
    with pytest.raises(UsageError, match="memory=auto: this system does not say"):
        opened("llama", 512, memory="auto")


def test_a_geometry_that_is_wrong_yields_to_the_engine() -> None:
    """Unknown layers: what the engine logged is what is allocated."""
    from kvtape.backends.llama.options import context_params, parse_llama_options
    from kvtape.backends.llama.sizes import CacheBytes

    shape = engine("llama")._shape
    wrong = dataclasses.replace(shape, geometry=dataclasses.replace(shape.geometry, groups=shape.geometry.groups * 50))
    params = context_params(SessionConfig(n_ctx=512), parse_llama_options({}), shape)
    assert CacheBytes(wrong, params, 123_456).allocated == 123_456
