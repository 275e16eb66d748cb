"""Every flag of every configuration on OpenVINO, by what only this engine can be asked; and what is refused at open."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.openvino.session import OpenVinoBackend
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.layout import Segment
from kvtape.planner.ranges import RangeSet
from support.capability_table import ROWS, open_row
from support.openvino_tiny import assert_whole, tiny_session, tokens

OFF = {"mirror": "off"}
ASKED = {"kv": "asked"}
SCORES = {"scores": "on"}
ROUNDING = {"f32": 2e-3, "bf16": 2e-2}
"""How far a row that is computed again, in other chunks, may be from what it was: components reach 3."""


@pytest.fixture(params=[row for row in ROWS if row.engine == "openvino"], ids=lambda row: row.name)
def configured(request: pytest.FixtureRequest) -> tuple[OpenVinoBackend, Capabilities]:
    backend = open_row(request.param)
    assert isinstance(backend, OpenVinoBackend)
    backend.prefill(tokens(24), 0)
    return backend, request.param.expected


def remove_tail(backend: OpenVinoBackend) -> None:
    backend.truncate(20)
    assert backend.books() == (Segment(0, 20, 0),)


def remove_middle(backend: OpenVinoBackend) -> None:
    backend.evict(4, 9)
    assert backend.books() == (Segment(0, 4, 0), Segment(9, 15, 9))


def position_shift(backend: OpenVinoBackend) -> None:
    before = backend.witness().rows.keys[0]
    backend.shift(10, 24, 3)
    assert backend.books() == (Segment(0, 10, 0), Segment(10, 14, 13))
    assert not np.allclose(backend.witness().rows.keys[0][10:], before[10:])


def cold_store(backend: OpenVinoBackend) -> None:
    before = backend.witness()
    block = backend.export_block(4, 9)
    backend.truncate(4)
    assert len(backend.witness().rows.keys[0]) == 4
    backend.admit(block, 4, 4)
    for was, now in zip(before.rows.keys + before.rows.values, _first_rows(backend, 9), strict=True):
        np.testing.assert_array_equal(was[:9], now)


def recompute_range(backend: OpenVinoBackend) -> None:
    ids = tokens(24)
    before = backend.witness()
    computed = backend.rebuild(RangeSet([(0, 20)]), ids[:20])
    assert computed.tokens == 20
    assert backend.refill(ids[20:], 20, 20).tokens == 4
    for was, now in zip(before.rows.keys + before.rows.values, _first_rows(backend, 24), strict=True):
        np.testing.assert_allclose(was, now, atol=ROUNDING[backend.config.options["inference"]])


def snapshot_state(backend: OpenVinoBackend) -> None:
    before, books = backend.witness(), backend.books()
    saved = backend.snapshot()
    backend.rebuild(RangeSet([(0, 3)]), tokens(3, seed=9))
    backend.restore(saved)
    assert backend.books() == books
    for was, now in zip(before.rows.keys + before.rows.values, _first_rows(backend, 24), strict=True):
        np.testing.assert_array_equal(was, now)


def attention_scores(backend: OpenVinoBackend) -> None:
    taken = backend.take_mass()
    assert taken.n_queries == 24
    np.testing.assert_allclose(taken.mass.sum(axis=1), 2 * 24, rtol=1e-6)
    before = backend.witness()
    assert backend.score(tokens(3), 24).mass.shape == (2, 24)
    assert backend.books() == (Segment(0, 24, 0),)
    for was, now in zip(before.rows.keys + before.rows.values, _first_rows(backend, 24), strict=True):
        np.testing.assert_array_equal(was, now)


def _first_rows(backend: OpenVinoBackend, n: int) -> tuple[np.ndarray, ...]:
    rows = backend.witness().rows
    assert all(len(r) == n for r in rows.keys + rows.values)
    return rows.keys + rows.values


PROOFS: dict[str, Callable[[OpenVinoBackend], None]] = {
    p.__name__: p
    for p in (
        remove_tail,
        remove_middle,
        position_shift,
        cold_store,
        recompute_range,
        snapshot_state,
        attention_scores,
    )
}
ATTEMPTS: dict[str, Callable[[OpenVinoBackend], object]] = {
    "remove_tail": lambda b: b.truncate(20),
    "remove_middle": lambda b: b.evict(4, 9),
    "position_shift": lambda b: b.shift(10, 24, 3),
    "cold_store": lambda b: b.export_block(4, 9),
    "attention_scores": lambda b: b.take_mass(),
}


@pytest.mark.parametrize("flag", PROOFS)
def test_a_true_flag_is_carried_out_and_a_false_one_refused(
    configured: tuple[OpenVinoBackend, Capabilities], flag: str
) -> None:
    backend, want = configured
    if getattr(want, flag):
        PROOFS[flag](backend)
        assert_whole(backend)
        return
    before = backend.witness()
    with pytest.raises(UnsupportedOperation, match=flag):
        ATTEMPTS[flag](backend)
    after = backend.witness()
    for was, now in zip(before.rows.keys + before.rows.values, after.rows.keys + after.rows.values, strict=True):
        np.testing.assert_array_equal(was, now)
    assert backend.books() == (Segment(0, 24, 0),)


def test_reasons_say_why() -> None:
    assert "mirror=off" in (tiny_session(options=OFF).refusal("remove_middle") or "")
    assert "scores=on" in (tiny_session().refusal("attention_scores") or "")
    assert "cold_budget_tokens" in (tiny_session(cold_budget_tokens=0).refusal("cold_store") or "")
    yarn = tiny_session("llama-yarn").refusal("position_shift") or ""
    assert "yarn rope scaling" in yarn
    assert "layer 0" in yarn
    with pytest.raises(ValueError, match="no capability"):
        tiny_session().refusal("teleport")


def test_unrotatable_keys_come_back_only_to_their_own_positions() -> None:
    backend = tiny_session("llama-yarn")
    backend.prefill(tokens(12), 0)
    block = backend.export_block(4, 8)
    backend.evict(4, 8)
    with pytest.raises(UnsupportedOperation, match="no plain rotation"):
        backend.admit(block, 4, 12)
    assert backend.books() == (Segment(0, 4, 0), Segment(8, 4, 8))
    backend.admit(block, 4, 4)
    assert backend.books() == (Segment(0, 12, 0),)
    assert_whole(backend)


def test_without_the_host_copy_a_refill_goes_behind_all_rows_only() -> None:
    backend = tiny_session(options=OFF)
    backend.prefill(tokens(10), 4)
    backend.refill(tokens(3), 20, 11)  # position 10 stays free
    books = (Segment(4, 10, 0), Segment(20, 3, 11))
    assert backend.books() == books
    with pytest.raises(UnsupportedOperation, match="rebuild instead"):
        backend.refill(tokens(1), 0, 10)
    assert backend.books() == books


@pytest.mark.parametrize(
    ("asked", "options", "effective"),
    [
        (("f16", "f16"), {}, ("f32", "f32")),
        (("bf16", "f16"), {}, ("f32", "f32")),
        (("f32", "f32"), {"kv": "auto"}, ("f32", "f32")),
        (("f16", "f16"), ASKED, ("f16", "f16")),
        (("f32", "f32"), ASKED, ("f32", "f32")),
        (("q8_0", "u8"), {}, ("f32", "f32")),
        (("f16", "f16"), {"inference": "bf16"}, ("bf16", "bf16")),
    ],
)
def test_config_shows_the_effective_storage(
    asked: tuple[str, str], options: dict[str, str], effective: tuple[str, str]
) -> None:
    backend = tiny_session(kv_type_k=asked[0], kv_type_v=asked[1], options=options, flash_attention="on")
    assert (backend.config.kv_type_k, backend.config.kv_type_v) == effective
    assert backend.config.flash_attention == "off"
    backend.prefill(tokens(20), 0)
    rows = backend.witness().rows
    every = (*rows.keys, *rows.values)
    halves = [np.array_equal(r, r.astype(np.float16).astype(np.float32)) for r in every]
    upper = [not (r.view(np.uint32) & 0xFFFF).any() for r in every]
    found = ["bf16" if short else "f16" if half else "f32" for half, short in zip(halves, upper, strict=True)]
    assert found == [effective[0]] * 4
    width = 4 if effective[0] == "f32" else 2
    assert backend.kv_bytes() == {
        "resident": 20 * 2 * 64 * width,
        "allocated": 20 * 2 * 64 * width,
        "mirror": 20 * 2 * 64 * 4,
    }


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"kv_type_k": "bf16", "kv_type_v": "bf16", "options": ASKED | {"inference": "f32"}}, "inference=bf16 others"),
        ({"kv_type_k": "bf16", "kv_type_v": "f16", "options": ASKED}, "bf16 and values as f16 in another type"),
        ({"kv_type_k": "f16", "kv_type_v": "f32", "options": ASKED}, "f16 and values as f32 in another type"),
        ({"kv_type_k": "f16", "kv_type_v": "u8", "options": ASKED}, "f16 and values as u8 in another type"),
        ({"options": ASKED | {"inference": "bf16"}}, "really keeps bf16, u8, bf16/u8, u8/bf16"),
        ({"kv_type_k": "u8", "kv_type_v": "u8", "options": ASKED | OFF}, "needs mirror=on"),
        ({"kv_type_k": "u4"}, "'u4': writing such rows back ends the process"),
        ({"kv_type_k": "u3", "options": ASKED}, "'u3'.*refuses the model"),
        ({"kv_type_v": "i8", "options": ASKED}, "'i8'"),
        ({"kv_type_v": "q8_0", "options": ASKED}, "'q8_0'; ask for bf16, f16, f32, u8"),
        ({"kv_type_v": "f8"}, "'f8'"),
        ({"options": {"mirror": "maybe"}}, "on, off"),
        ({"options": {"way": "native"}}, "allowed: inference, kv, memory, mirror, scores"),
        ({"options": OFF | SCORES}, "scores=on needs mirror=on"),
        ({"options": {"scores": "yes"}}, "on, off"),
        ({"n_ctx": 0}, "n_ctx"),
        ({"chunk": 0}, "chunk"),
        ({"threads": 0}, "threads"),
        ({"cold_budget_tokens": -1}, "cold_budget_tokens"),
        ({"n_ctx": 512.0}, "n_ctx"),
    ],
)
def test_what_cannot_be_had_is_refused(config: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        tiny_session(**config)


@pytest.mark.parametrize(("asked", "effective"), [(1, 256), (255, 256), (256, 256), (1000, 1024), (1024, 1024)])
def test_the_context_is_padded_as_on_llama_cpp(asked: int, effective: int) -> None:
    backend = tiny_session(n_ctx=asked)
    assert backend.n_ctx == effective
    assert backend.config.n_ctx == asked
