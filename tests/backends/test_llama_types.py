"""Every pair of storage types on llama.cpp: what opens, what it weighs, what rows read as, what crashes."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvtape.backends.errors import EnvironmentProblem, StateRejected, UsageError
from kvtape.backends.llama.attention import AttentionTap, CellSums, TapError
from kvtape.backends.llama.context import LIVE, ContextParams, NativeContext
from kvtape.backends.llama.engine_words import EngineWords, read_words
from kvtape.backends.llama.kv_types import GGML_TYPES, NARROW, numbers
from kvtape.backends.llama.memory import LiveMemory
from kvtape.backends.llama.native import NativeModel
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.llama.spread import unspread
from kvtape.backends.rounding import PACKED_TYPES, ROUNDING
from kvtape.capacity.widths import KV_TYPES
from support import llama_aborts
from support.llama_tiny import image, model_file, prefilled, session, tokens
from support.tiny_latent import write_tiny_latent

WIDE: dict[str, Any] = {"n_embd": 128, "n_head": 2, "n_head_kv": 1, "head_dim": 64}
_CELL = 12


def opened(k: str, v: str, flash: str = "on", **options: str) -> LlamaBackend:
    config = {"n_ctx": 256, "chunk": 64, "kv_type_k": k, "kv_type_v": v, "flash_attention": flash, "options": options}
    backend: LlamaBackend = session(config=config, **WIDE)
    return backend


def apart(found: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    """The largest relative distance of a row."""
    return float(np.max(np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)))


# -- what opens ------------------------------------------------------------------------------------------------------


def test_the_types_are_those_whose_bytes_are_known() -> None:
    assert sorted(GGML_TYPES) == sorted(KV_TYPES)
    assert set(GGML_TYPES) <= set(ROUNDING)


@pytest.mark.parametrize("k", sorted(GGML_TYPES))
@pytest.mark.parametrize("flash", ["off", "on", "auto"])
def test_every_pair_opens_computes_and_weighs_what_was_said(k: str, flash: str) -> None:
    """Predicted bytes are those the engine logs and those it saves; without flash attention values cannot be packed."""
    for v in sorted(GGML_TYPES):
        if flash == "off" and v in PACKED_TYPES:
            with pytest.raises(UsageError, match=f"kv_type_v {v}: .* ask for flash attention on or auto"):
                opened(k, v, flash)
            continue
        backend = opened(k, v, flash)
        assert backend.config.flash_attention == ("off" if flash == "off" else "on")
        allocated, logged = backend.kv_bytes()["allocated"], backend._context.words.allocated_bytes
        assert abs(allocated - logged) <= 0.0051 * 2**20
        logits = backend.prefill(tokens(20), 0).logits
        assert np.isfinite(logits).all()
        before, saved = backend.kv_bytes()["resident"], backend._context.sequence_size(LIVE)
        backend.prefill(tokens(30), 20)
        grown = backend._context.sequence_size(LIVE) - saved - 30 * _CELL
        assert backend.kv_bytes()["resident"] - before == grown
        assert allocated * 30 == grown * backend._context.n_ctx
        backend.close()


def test_flash_attention_runs_exactly_where_it_is_said_to() -> None:
    """Without it every layer has a soft-max node; the tap counts them."""
    model = NativeModel(str(model_file("llama", **WIDE)))
    for asked, runs in (("off", False), ("on", True), ("auto", True)):
        tap = AttentionTap()
        context = NativeContext(model, ContextParams(256, 64, 64, "f16", "f16", asked, 1, True), tap)  # type: ignore[arg-type]
        assert context.flash_attention == ("on" if runs else "off")
        seen = CellSums(256, frozenset({0, 1}))
        try:
            with tap.collect(seen):
                context.decode(np.full(5, 7, np.int32), 0, LIVE, want_logits=False)
        except TapError:
            assert runs
        assert seen.n_seen == (0 if runs else 5)
        context.close()
    model.close()


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["x: flash_attn            = disabled"], False),
        (["x: flash_attn            = auto", "y: Flash Attention enabled"], True),
        (["x: flash_attn            = auto", "y: Flash Attention not supported, set to disabled"], False),
        (["x: flash_attn            = enabled", "x: flash_attn            = disabled"], False),
        (["x: flash_attn            = auto"], None),
        ([], None),
    ],
)
def test_the_engine_s_words_on_flash_attention(lines: list[str], said: bool | None) -> None:
    assert read_words(lines).flash_attention is said


def test_the_engine_s_words_on_its_caches() -> None:
    lines = ["CPU KV buffer size =     0.12 MiB", "attn_rot_k = 1, n_embd_head_k_all = 64", "attn_rot_v = 0, n = 64"]
    assert read_words([*lines, *lines]) == EngineWords(round(0.24 * 2**20), None, (True, True), (False, False))


@pytest.mark.parametrize(("said", "asked"), [(None, "auto"), (None, "on"), (False, "on"), (True, "off")])
def test_a_context_that_runs_something_else_is_refused(
    said: bool | None, asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = EngineWords(0, said, (), ())
    monkeypatch.setattr("kvtape.backends.llama.context.read_words", lambda _: words)
    with pytest.raises(EnvironmentProblem, match="flash attention"):
        opened("f16", "f16", asked)


# -- what rows read as -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", sorted(GGML_TYPES))
def test_rows_read_as_what_was_computed_but_for_rounding(kv_type: str) -> None:
    """Layer 0 sees no cache: its keys and values are those of an f32 cache, rounded once."""
    exact, stored = (opened(t, t) for t in ("f32", kv_type))
    for backend in (exact, stored):
        backend.prefill(tokens(60), 0)
    for part in ("keys", "values"):
        rows, wanted = (getattr(b.witness().rows, part)[0] for b in (stored, exact))
        found = apart(rows.astype(np.float64), wanted)
        assert found <= ROUNDING[kv_type]
        assert found >= ROUNDING[kv_type] / 4, "the bound is not that of this type"


@given(raw=arrays(np.uint8, (3, 68)))
def test_q8_0_by_its_definition(raw: npt.NDArray[np.uint8]) -> None:
    """An f16 scale, then 32 signed bytes."""
    raw[:, [1, 35]] &= 0x3B  # finite scales
    blocks = raw.reshape(-1, 34)
    wanted = blocks[:, :2].copy().view(np.float16).astype(np.float32) * blocks[:, 2:].view(np.int8)
    np.testing.assert_array_equal(numbers(GGML_TYPES["q8_0"], raw), wanted.reshape(3, 64))


@given(raw=arrays(np.uint8, (3, 36)))
def test_q4_0_by_its_definition(raw: npt.NDArray[np.uint8]) -> None:
    """An f16 scale, then 16 bytes: their low halves are the first 16 numbers, their high halves the others, less 8."""
    raw[:, [1, 19]] &= 0x3B
    blocks = raw.reshape(-1, 18)
    halves = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], axis=1).astype(np.float32) - 8
    wanted = blocks[:, :2].copy().view(np.float16).astype(np.float32) * halves
    np.testing.assert_array_equal(numbers(GGML_TYPES["q4_0"], raw), wanted.reshape(3, 64))


def test_another_type_is_no_row() -> None:
    with pytest.raises(StateRejected, match="ggml type 9 cannot be read"):
        numbers(9, np.zeros((1, 36), np.uint8))


_FLOATS = st.floats(-100, 100, width=32)


@given(size=st.sampled_from([2, 16, 64]), rows=arrays(np.float32, (3, 128), elements=_FLOATS))
def test_unspread_is_a_hadamard_matrix(size: int, rows: npt.NDArray[np.float32]) -> None:
    """By its recursive definition; it is its own inverse; a row comes out the same alone."""
    matrix = np.ones((1, 1))
    while len(matrix) < size:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    wanted = (rows.reshape(-1, size).astype(np.float64) @ matrix / np.sqrt(size)).reshape(rows.shape)
    found = unspread(rows, size)
    np.testing.assert_allclose(found, wanted, atol=1e-3)
    np.testing.assert_allclose(unspread(found, size), rows, atol=1e-3)
    np.testing.assert_array_equal(found[1:2], unspread(rows[1:2], size))


@pytest.mark.parametrize(("head_dim", "heads"), [(128, 1), (192, 2), (256, 1)])
def test_heads_of_other_sizes_are_unspread_too(head_dim: int, heads: int) -> None:
    shape = {"n_embd": 256, "n_head": 2, "n_head_kv": heads, "head_dim": head_dim}
    config = {"n_ctx": 256, "flash_attention": "on"}
    rows = []
    for kv_type in ("f32", "q8_0"):
        backend, _ = prefilled(20, config=config | {"kv_type_k": kv_type, "kv_type_v": kv_type}, **shape)
        rows.append(backend.witness().rows)
        backend.close()
    exact, stored = rows
    assert apart(stored.keys[0], exact.keys[0]) <= ROUNDING["q8_0"]
    assert apart(stored.values[0], exact.values[0]) <= ROUNDING["q8_0"]


def test_rows_that_the_engine_was_told_not_to_spread_are_read_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ATTN_ROT_DISABLE", "1")
    exact, stored = opened("f32", "f32"), opened("q8_0", "q8_0")
    assert "does not spread" in str(stored.refusal("position_shift"))
    rows = []
    for backend in (exact, stored):
        backend.prefill(tokens(20), 0)
        rows.append(backend.witness().rows)
        backend.close()
    assert apart(rows[1].keys[0], rows[0].keys[0]) <= ROUNDING["q8_0"]
    assert apart(rows[1].values[0], rows[0].values[0]) <= ROUNDING["q8_0"]


# -- packed bytes travel whole ---------------------------------------------------------------------------------------


def packed_bytes(backend: LlamaBackend) -> list[bytes]:
    """The raw rows of every layer in position order, as the engine keeps them."""
    cache = backend._memory.read()
    ordered = cache.take(np.argsort(cache.positions, kind="stable"))
    return [layer.rows.tobytes() for layer in (*ordered.keys, *ordered.values)]


@pytest.mark.parametrize(("k", "v", "flash"), [*((t, t, "on") for t in sorted(PACKED_TYPES)), ("q8_0", "f16", "off")])
def test_packed_rows_come_back_to_the_bit(k: str, v: str, flash: str) -> None:
    backend = opened(k, v, flash)
    backend.prefill(tokens(60), 0)
    before, rows = packed_bytes(backend), image(backend)
    block = backend.export_block(20, 30)
    backend.evict(20, 30)
    backend.admit(block, 20, 20)
    assert packed_bytes(backend) == before
    saved = backend.snapshot()
    backend.truncate(10)
    backend.restore(saved)
    assert packed_bytes(backend) == before
    assert image(backend) == rows
    backend.close()


# -- shifts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_type", sorted(GGML_TYPES.keys() - {"bf16"}))
def test_the_proof_at_open_sees_through_rounding(kv_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys whose positions moved while they were not turned are found, however coarse the type is."""
    allowed = {"shift_quantised": "yes"}
    sound = opened(kv_type, kv_type, **allowed)
    assert sound.capabilities.position_shift
    sound.close()
    monkeypatch.setattr(LiveMemory, "flush", lambda self: setattr(self, "_pending_shift", False))
    backend = opened(kv_type, kv_type, **allowed)
    assert not backend.capabilities.position_shift
    assert "layer-0 keys are not those of their new positions" in str(backend.refusal("position_shift"))
    backend.close()


@pytest.mark.parametrize("kv_type", sorted(NARROW))
def test_narrow_keys_are_shifted_only_when_asked(kv_type: str) -> None:
    backend = opened(kv_type, kv_type)
    assert "rounds" in str(backend.refusal("position_shift"))
    assert "shift_quantised=yes" in str(backend.refusal("position_shift"))
    backend.close()


def test_narrow_keys_drift_and_8_bit_ones_stay() -> None:
    """What the gate is for: eighty moves there and back, and the keys should be what they were."""
    drift = {}
    for kv_type in ("f16", "q8_0", "q4_0"):
        backend = opened(kv_type, kv_type, shift_quantised="yes")
        backend.prefill(tokens(40), 0)
        before = backend.witness().rows.keys[0].astype(np.float64)
        for delta in itertools.chain.from_iterable([(7, -7)] * 40):
            at = backend._memory.next_position
            backend.shift(at - 40, at, delta)
            backend._memory.flush()
        drift[kv_type] = apart(backend.witness().rows.keys[0], before)
        backend.close()
    assert drift["f16"] < 0.01
    assert drift["q8_0"] < 0.2
    assert drift["q4_0"] > 0.3


CRASHES = {
    "q8_0 keys of heads of 32": ({}, "q8_0", "f16", "off"),
    "q4_0 keys of heads of 96": ({"n_embd": 192, "head_dim": 96}, "q4_0", "q4_0", "on"),
    "bf16 keys": (WIDE, "bf16", "f16", "off"),
    "q8_0 keys that RoPE turns in part": ({"latent": True}, "q8_0", "q8_0", "on"),
}


@pytest.mark.parametrize("name", CRASHES)
def test_what_the_gates_forbid_ends_the_process(name: str, tmp_path: Path) -> None:
    shape, k, v, flash = CRASHES[name]
    path = write_tiny_latent(tmp_path / "m.gguf", absorbed=False) if "latent" in shape else model_file(**shape)
    command = [sys.executable, llama_aborts.__file__, str(path), k, v, flash]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.stdout == "computed\n"
    assert ended.returncode in (-signal.SIGABRT, -signal.SIGSEGV)


def test_what_is_not_forbidden_lives() -> None:
    command = [sys.executable, llama_aborts.__file__, str(model_file(**WIDE)), "q8_0", "q8_0", "on"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "computed\nrotated\n"
