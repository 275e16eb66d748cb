"""The parser of llama.cpp's state bytes is the inverse of the builder, and refuses every other byte string."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import StateRejected
from kvtape.backends.llama.blob import (
    Cache,
    LayerRows,
    SequenceState,
    build_sequence,
    cells_size,
    parse_cells,
    parse_sequence,
    parse_whole,
)
from support import llama_tiny

WIDTHS = {0: 4, 1: 2, 30: 2}


@st.composite
def caches(draw: st.DrawFn, *, extended: bool) -> Cache:
    n = draw(st.integers(0, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_layer = draw(st.integers(1, 3)) if n else 0

    def layers() -> tuple[LayerRows, ...]:
        kinds = [draw(st.sampled_from(sorted(WIDTHS))) for _ in range(n_layer)]
        widths = [draw(st.integers(1, 4)) * WIDTHS[kind] for kind in kinds]
        return tuple(
            LayerRows(kind, rng.integers(0, 256, (n, width), dtype=np.uint8))
            for kind, width in zip(kinds, widths, strict=True)
        )

    return Cache(
        positions=rng.permutation(1000)[:n].astype(np.int32),
        sequences=np.zeros(n, np.int32),
        extra=rng.integers(-5, 500, (n, 3), dtype=np.int32) if extended else None,
        v_trans=n > 0 and draw(st.booleans()),
        keys=layers(),
        values=layers(),
    )


@st.composite
def states(draw: st.DrawFn) -> tuple[SequenceState, bool]:
    extended = draw(st.booleans())
    parts = draw(st.lists(caches(extended=extended), min_size=1, max_size=2))
    return SequenceState(draw(st.integers(0, 1)), tuple(parts)), extended


def assert_same(left: Cache, right: Cache) -> None:
    np.testing.assert_array_equal(left.positions, right.positions)
    np.testing.assert_array_equal(left.sequences, right.sequences)
    np.testing.assert_array_equal(left.extra, right.extra)
    assert left.v_trans == right.v_trans
    for ours, theirs in ((left.keys, right.keys), (left.values, right.values)):
        assert [r.ggml_type for r in ours] == [r.ggml_type for r in theirs]
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a.rows, b.rows)


@given(states())
def test_parse_is_the_inverse_of_build(drawn: tuple[SequenceState, bool]) -> None:
    state, extended = drawn
    raw = build_sequence(state)
    parsed = parse_sequence(raw, extended=extended)
    assert parsed.sequence == state.sequence
    assert parsed.rest == b""
    for left, right in zip(state.caches, parsed.caches, strict=True):
        assert_same(left, right)
    assert build_sequence(parsed) == raw


@given(states(), st.data())
def test_no_proper_prefix_is_a_state(drawn: tuple[SequenceState, bool], data: st.DataObject) -> None:
    state, extended = drawn
    raw = build_sequence(state)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(StateRejected):
        parse_sequence(raw[:cut], extended=extended, n_caches=len(state.caches))


@given(states(), st.binary(min_size=1, max_size=9))
def test_what_follows_the_caches_is_kept_apart(drawn: tuple[SequenceState, bool], tail: bytes) -> None:
    state, extended = drawn
    raw = build_sequence(state) + tail
    assert parse_sequence(raw, extended=extended, n_caches=len(state.caches)).rest == tail


@given(caches(extended=False), st.data())
def test_take_moves_whole_cells(cache: Cache, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(cache.positions))))
    taken = cache.take(np.array(order, np.intp))
    for new, old in enumerate(order):
        assert taken.positions[new] == cache.positions[old]
        for layers, before in ((taken.keys, cache.keys), (taken.values, cache.values)):
            for a, b in zip(layers, before, strict=True):
                np.testing.assert_array_equal(a.rows[new], b.rows[old])


@given(caches(extended=True))
def test_cell_list_alone(cache: Cache) -> None:
    n = len(cache.positions)
    raw = build_sequence(SequenceState(0, (cache,)))
    found = parse_cells(raw[: cells_size(n, extended=True)], extended=True)
    np.testing.assert_array_equal(found, cache.positions)
    if n:
        assert parse_cells(raw[: cells_size(n - 1, extended=True)], extended=True) == n
        assert parse_cells(raw + bytes(20), extended=True) == n


def test_foreign_magic_streams_and_shared_cells_are_refused() -> None:
    cache = Cache(np.array([3], np.int32), np.zeros(1, np.int32), None, False, (), ())
    raw = bytearray(build_sequence(SequenceState(0, (cache,))))
    for offset, what in ((0, "begins with"), (8, "streams"), (20, "number of sequences"), (28, "v_trans")):
        bad = bytearray(raw)
        bad[offset] ^= 0x02
        with pytest.raises(StateRejected, match=what):
            parse_sequence(bytes(bad))


@pytest.mark.parametrize(("kv_type", "dtype"), [("f32", np.float32), ("f16", np.float16), ("bf16", np.float32)])
@pytest.mark.parametrize("flash", ["off", "on"])
def test_the_engine_s_own_bytes_round_trip(kv_type: str, dtype: type, flash: str) -> None:
    backend, _ = llama_tiny.prefilled(9, config={"kv_type_k": kv_type, "kv_type_v": kv_type, "flash_attention": flash})
    raw = backend._context.read_sequence(0)
    state = parse_sequence(raw)
    assert state.caches[0].v_trans is (flash == "off")
    assert build_sequence(state) == raw
    assert {k.numbers().dtype for k in state.caches[0].keys} == {np.dtype(dtype)}
    backend.close()


@pytest.mark.parametrize("arch", ["llama", "gemma3", "qwen2vl"])
def test_whole_state_has_the_same_rows(arch: str) -> None:
    backend, _ = llama_tiny.prefilled(9, arch)
    extended = arch == "qwen2vl"
    one = parse_sequence(backend._context.read_sequence(0), extended=extended).caches
    whole = parse_whole(backend._context.read_all(), extended=extended)
    assert len(one) == len(whole) == (2 if arch == "gemma3" else 1)
    for left, right in zip(one, whole, strict=True):
        assert_same(left, right)
    backend.close()


@given(caches(extended=False))
def test_a_latent_cache_has_no_value_rows(cache: Cache) -> None:
    """One latent row a token stands for its keys and values; whether a model is so is told, never guessed."""
    state = SequenceState(1, (replace(cache, values=(), v_trans=False),))
    raw = build_sequence(state)
    (parsed,) = parse_sequence(raw, latent=True).caches
    assert_same(state.caches[0], parsed)
    assert parse_sequence(raw + b"rest", latent=True, n_caches=1).rest == b"rest"
    if len(cache.positions):
        with pytest.raises(StateRejected, match="more expected"):
            parse_sequence(raw)
