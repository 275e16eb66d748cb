"""Storage types by what they do to rows: their formulas, and what the CPU plugin really keeps, for every pair."""

from __future__ import annotations

import itertools
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvtape.backends.errors import UsageError
from kvtape.backends.openvino.compiled import Profile
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.storage import PAIRS, Storage, ladder
from kvtape.backends.protocol import SessionConfig
from support import openvino_aborts
from support.openvino_kept import compiled_runner, keep, kept_as
from support.openvino_tiny import tiny_path
from support.processor import refused_here

pytestmark = pytest.mark.contract("I5")

TYPES = ("f32", "f16", "bf16", "u8")
U8 = Storage("u8")
F32 = npt.NDArray[np.float32]

rows_of_16 = arrays(np.float32, (3, 16), elements=st.integers(-(10**5), 10**5).map(lambda n: n / 1024))
"""No row of a model has a range so small that its steps are no normal numbers."""


@given(rows_of_16)
def test_u8_moves_no_component_by_more_than_half_a_step(rows: F32) -> None:
    stored = U8.stored(rows)
    step = (rows.max(axis=1, keepdims=True).astype(np.float64) - rows.min(axis=1, keepdims=True)) / 255
    # A row far from zero has levels no finer than its own last bits.
    slack = 4 * np.spacing(np.abs(rows).max(axis=1, keepdims=True))
    wide = step[:, 0] > 1e-3
    assert (np.abs(stored - rows.astype(np.float64)) <= 0.5001 * step + slack)[wide].all()


@given(rows_of_16)
def test_u8_keeps_256_levels_and_the_order_of_components(rows: F32) -> None:
    for row, stored in zip(rows, U8.stored(rows), strict=True):
        assert (np.diff(stored[np.argsort(row, kind="stable")]) >= 0).all()
    wide = np.linspace(-3, 5, 1000, dtype=np.float32)[None]
    assert len(np.unique(U8.stored(wide))) == 256


@settings(max_examples=10)
@given(rows_of_16)
def test_u8_of_a_row_does_not_depend_on_its_neighbours(rows: F32) -> None:
    many = np.tile(rows, (20_000 // 3, 1))
    np.testing.assert_array_equal(U8.stored(many)[-3:], np.concatenate([U8.stored(r[None]) for r in rows]))


@example(np.full(8, 129, np.float32))  # one of them itself, with an odd last bit
@given(arrays(np.float32, 8, elements=st.floats(-(2**100), 2**100, width=32)))
def test_bf16_is_the_nearest_of_the_numbers_with_8_bits(row: F32) -> None:
    for x, got in zip(row, Storage("bf16", "bf16").stored(row), strict=True):
        bits = int(x.view(np.uint32))
        below, above = (
            np.uint32(b << 16).view(np.float32) for b in (bits >> 16, (bits >> 16) + 1 if bits & 0xFFFF else bits >> 16)
        )
        far = {float(c): abs(Fraction(float(c)) - Fraction(float(x))) for c in (below, above)}
        assert far[float(got)] == min(far.values())
        if below != above and far[float(below)] == far[float(above)]:
            assert not int(got.view(np.uint32)) >> 16 & 1


def test_exact_types_give_back_what_they_got() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 5, 1, 32)).astype(np.float32)
    assert Storage("f32").stored(rows) is rows
    assert Storage("f32").keeps_every_bit
    assert not any(Storage(t).keeps_every_bit for t in ("f16", "u8"))
    np.testing.assert_array_equal(Storage("f16").stored(rows), rows.astype(np.float16))
    half = Storage("u8", "bf16")
    np.testing.assert_array_equal(half.stored(rows), U8.stored(half.written(rows)))


@pytest.mark.parametrize("inference", ["f32", "bf16"])
@pytest.mark.parametrize(("keys", "values"), list(itertools.product(TYPES, TYPES)))
def test_what_the_plugin_really_keeps(keys: str, values: str, inference: str) -> None:
    """Found from the rows. It answers what it was asked for, whatever it keeps."""
    kept = keep(keys, values, inference)
    assert kept.answers == (keys, values)
    found = (kept_as(kept.keys, kept.stored_keys, inference), kept_as(kept.values, kept.stored_values, inference))
    silently = tuple(t if t == "u8" else inference for t in (keys, values))
    assert found == ((keys, values) if (keys, values) in PAIRS[inference] else silently)


@pytest.mark.parametrize("inference", ["f32", "bf16"])
def test_rows_that_are_written_back_are_rounded_alike(inference: str) -> None:
    """Prefill, single tokens and writes are three pieces of code in the plugin. Halves between levels show them."""
    kept = keep("u8", "u8", inference)
    storage = Storage("u8", inference)
    kept.runner.load(storage.written(kept.keys), storage.written(kept.values))
    states = kept.runner.states()
    np.testing.assert_array_equal(np.stack(states.keys), kept.stored_keys)
    np.testing.assert_array_equal(np.stack(states.values), kept.stored_values)
    halves = ladder(2, 2, 32, 2000)
    kept.runner.load(storage.written(halves), storage.written(halves))
    np.testing.assert_array_equal(np.stack(kept.runner.states().keys), storage.stored(halves))


def test_the_ladder_tells_two_roundings_from_one() -> None:
    """What `Compiled` writes to learn how a processor rounds would not show it otherwise."""
    rows = ladder(4, 2, 64)
    low, high = rows.min(-1, keepdims=True), rows.max(-1, keepdims=True)
    step = (high - low) / np.float32(255)
    zero = -low / step
    twice = (np.clip(np.rint(rows * (1 / step) + zero), 0, 255) - zero) * step
    assert 1 <= (twice != U8.stored(rows)).sum() < rows.size / 100


@pytest.mark.parametrize("group", [16, 32])
def test_groups_have_a_grid_each_and_are_not_offered(group: int) -> None:
    """The plugin honours group sizes that divide a head; nothing here sets one, so a head is one group."""
    sizes = {"KEY_CACHE_GROUP_SIZE": str(group), "VALUE_CACHE_GROUP_SIZE": str(group)}
    with pytest.raises(RuntimeError, match="cannot be divided by group size 24"):
        compiled_runner(Profile("u8", "u8", 1).properties() | {"KEY_CACHE_GROUP_SIZE": "24"})
    kept = keep("u8", "u8", more=sizes)
    apart = kept.keys.reshape(*kept.keys.shape[:-1], -1, group)
    np.testing.assert_array_equal(U8.stored(apart).reshape(kept.keys.shape), kept.stored_keys)
    if group < kept.keys.shape[-1]:
        assert kept_as(kept.keys, kept.stored_keys, "f32") is None
    assert not any("GROUP" in name for name in Profile("u8", "u8", 1).properties())


def test_keys_by_channel_change_under_later_tokens_and_cannot_be_written() -> None:
    """Why no session has it: a row is not what it was once other rows follow, and a write destroys the cache."""
    kept = keep("u8", "u8", more={"KEY_CACHE_QUANT_MODE": "BY_CHANNEL"})
    assert kept.answers == ("u8", "u8")
    assert (kept.stored_keys[:, :16] != kept.earlier).mean() > 0.1
    kept.runner.load(kept.keys, kept.values)
    assert not np.abs(np.stack(kept.runner.states().keys) - kept.keys).max() < 1e3
    assert not any("MODE" in name and "QUANT" in name for name in Profile("u8", "u8", 1).properties())


@pytest.mark.parametrize(
    ("kv_type", "words"),
    [("u3", "but gets u3"), ("i8", "Wrong value i8"), ("f64", "Wrong value f64"), ("i4", "Wrong value i4")],
)
def test_types_that_the_plugin_itself_refuses(kv_type: str, words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        compiled_runner(Profile(kv_type, kv_type, 1).properties())


def test_keys_of_i8_are_taken_by_name_only() -> None:
    with pytest.raises(RuntimeError, match="but gets i8"):
        compiled_runner(Profile("i8", "u8", 1).properties() | {"KV_CACHE_PRECISION": "u8"})
    with pytest.raises(RuntimeError, match="VALUE_CACHE_PRECISION"):
        compiled_runner(Profile("u8", "i8", 1).properties())


def test_f16_inference_is_bf16_inference() -> None:
    kept = keep("f32", "f32", "bf16", {"INFERENCE_PRECISION_HINT": "f16"})
    assert kept_as(kept.keys, kept.stored_keys, "bf16") == "bf16"


def test_a_processor_that_computes_in_f32_all_the_same_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one without bf16 does: the plugin takes the hint in silence. Only there may a test end with the refusal."""
    right = Profile.properties
    hint = {"INFERENCE_PRECISION_HINT": "f32"}
    monkeypatch.setattr(Profile, "properties", lambda self: right(self) | hint)
    for kept in ("bf16", "u8"):
        types = {"kv_type_k": kept, "kv_type_v": kept, "uncertified": True}
        # An engine of its own: what other tests compiled is not what is asked for here.
        engine = OpenVinoEngine.load(tiny_path("llama"))
        with pytest.raises(UsageError, match=r"OpenVINO does not store keys as \w+ here") as refused:
            engine.open(SessionConfig(n_ctx=64, options={"kv": "asked", "inference": "bf16"}, **types))
        assert refused_here(refused.value, bf16=False) == str(refused.value)
        assert refused_here(refused.value, bf16=True) is None
        engine.close()
    assert refused_here(UsageError("OpenVINO does not store keys as u8 here"), bf16=False) is None


def test_values_by_channel_are_values_by_row() -> None:
    kept = keep("u8", "u8", more={"VALUE_CACHE_QUANT_MODE": "BY_CHANNEL"})
    assert kept_as(kept.values, kept.stored_values, "f32") == "u8"


def test_rows_that_were_read_do_not_go_back_as_they_were() -> None:
    """Why u8 needs the host copy, and why what is written under bf16 inference is rounded first."""
    kept = keep("u8", "u8")
    kept.runner.load(kept.stored_keys, kept.stored_values)
    again = np.stack(kept.runner.states().keys)
    assert not np.array_equal(again, kept.stored_keys)
    np.testing.assert_allclose(again, kept.stored_keys, atol=1e-5)
    kept = keep("u8", "u8", "bf16")
    kept.runner.load(kept.keys, kept.values)
    assert (np.stack(kept.runner.states().keys) != kept.stored_keys).mean() > 0.5


@pytest.mark.parametrize(("keys", "values", "lives"), [("u8", "u8", True), ("u4", "u8", False), ("u8", "u4", False)])
def test_writing_u4_rows_ends_the_process(keys: str, values: str, lives: bool) -> None:
    command = [sys.executable, str(Path(openvino_aborts.__file__)), str(tiny_path("llama-two-kv-heads")), keys, values]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode == 0, "survived" in done.stdout) == (lives, lives), done.stderr
    if not lives:
        assert done.returncode < 0


def test_u4_rows_do_not_even_read_back() -> None:
    """It computes with them, but what the states show is off by more than the rows' whole range."""
    kept = keep("u4", "u4")
    wide = (kept.keys.max(-1) - kept.keys.min(-1)).max()
    assert np.abs(kept.stored_keys - kept.keys).max() > wide


def test_accuracy_mode_ignores_the_general_property() -> None:
    """KV_CACHE_PRECISION alone changes nothing, and the model then answers that it did."""
    properties = Profile("f32", "f32", 1).properties() | {"KV_CACHE_PRECISION": "u8"}
    del properties["KEY_CACHE_PRECISION"], properties["VALUE_CACHE_PRECISION"]
    runner, _ = compiled_runner(properties)
    step = runner.step(np.array([7, 8, 9]), np.arange(3), np.empty(0, np.int64))
    np.testing.assert_array_equal(np.stack(runner.states().keys), step.keys)
