"""Sessions whose rows are not f32: cuts from the host copy, chunks, numbers, and who may cut at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings

from kvtape.backends.errors import EngineFault, FatalClass, UnsupportedOperation
from kvtape.backends.openvino.session import OpenVinoBackend
from kvtape.backends.openvino.storage import PAIRS
from kvtape.backends.proofs.machine import machine_class
from kvtape.backends.proofs.rows import Measure, ProofRow
from kvtape.backends.proofs.store import PROOFS_VARIABLE, add_rows
from kvtape.backends.protocol import SessionConfig
from kvtape.planner.layout import Segment
from support.attention import ScoredOracle, assert_mass
from support.openvino_ir import tiny_ir_engine
from support.openvino_machine import Machine
from support.openvino_tiny import assert_whole, same_rows, tiny_engine, tiny_path, tiny_session, tokens
from support.oracle import OracleModel

pytestmark = pytest.mark.contract("I5")

MODEL = "llama-two-kv-heads"
EVERY = [(keys, values, inference) for inference in sorted(PAIRS) for keys, values in PAIRS[inference]]
NAMES = ["-".join(some) for some in EVERY]
ASKED: dict[str, Any] = {"options": {"kv": "asked"}, "uncertified": True}
SURGERY = ("remove_tail", "remove_middle", "position_shift", "cold_store")


def opened(keys: str, values: str, inference: str = "auto", model: str = MODEL, **config: Any) -> OpenVinoBackend:
    options = {"kv": "asked", "inference": inference} | config.pop("options", {})
    asked = {"kv_type_k": keys, "kv_type_v": values, "options": options, "uncertified": True} | config
    return tiny_session(model, **asked)


def forced(backend: OpenVinoBackend, ids: list[int], at: int) -> npt.NDArray[np.float32]:
    """Every logit of decoding `ids` from tape position `at`."""
    left, seen = iter(ids), []

    def choose(logits: npt.NDArray[np.float32]) -> int | None:
        seen.append(logits)
        return next(left, None)

    run = backend.decode_until(len(ids), 512, at, np.zeros(320, np.float32), choose)
    return np.stack([*seen[1:], run.logits])


def kl(p: npt.NDArray[np.float32], q: npt.NDArray[np.float32]) -> float:
    """Largest divergence of q from p, in nats, of rows of logits."""
    logs = [x - np.log(np.exp(x).sum(axis=-1, keepdims=True)) for x in (p.astype(np.float64), q.astype(np.float64))]
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum(axis=-1).max())


@pytest.mark.parametrize(("keys", "values", "inference"), EVERY, ids=NAMES)
def test_what_comes_back_from_the_host_copy_is_bit_equal_to_never_cut(keys: str, values: str, inference: str) -> None:
    """Put back in place, carried to another request, restored: rows and every later logit."""
    ids, more = tokens(40), tokens(6, seed=3)
    untouched, cut, moved = (opened(keys, values, inference) for _ in range(3))
    for backend in (untouched, cut, moved):
        backend.prefill(ids, 0)
    block = cut.export_block(10, 20)
    cut.evict(10, 20)
    assert_whole(cut)
    cut.admit(block, 10, 10)
    saved = moved.snapshot()
    moved.evict(4, 30)
    moved.shift(30, 40, -26)
    moved.shift(4, 14, 26)
    assert_whole(moved)
    moved.restore(saved)
    victim = opened(keys, values, inference)
    victim.prefill(tokens(5), 0)
    victim.abort_next()
    with pytest.raises(EngineFault):
        victim.prefill(tokens(2), 5)  # all three are carried to a fresh compiled model
    assert same_rows(untouched, cut)
    assert same_rows(untouched, moved)
    want = forced(untouched, more, 40)
    np.testing.assert_array_equal(forced(cut, more, 40), want)
    np.testing.assert_array_equal(forced(moved, more, 40), want)
    assert_whole(cut)


@pytest.mark.parametrize(("keys", "values", "inference"), EVERY, ids=NAMES)
def test_many_small_shifts_add_nothing_up(keys: str, values: str, inference: str) -> None:
    """Keys are turned from what was computed, never from what was kept."""
    backend = opened(keys, values, inference)
    backend.prefill(tokens(20), 0)
    before = backend.witness()
    for _ in range(30):
        backend.shift(10, 60, 1)
    backend.shift(40, 60, -30)
    after = backend.witness()
    for was, now in zip(before.rows.keys + before.rows.values, after.rows.keys + after.rows.values, strict=True):
        np.testing.assert_array_equal(was, now)


@pytest.mark.parametrize(
    ("model", "keys", "values", "inference", "bound"),
    [
        ("llama", "f16", "f16", "f32", 1e-6),
        ("llama", "u8", "f32", "f32", 3e-5),
        ("llama", "f32", "u8", "f32", 3e-5),
        ("llama", "u8", "u8", "f32", 5e-5),
        ("qwen2", "u8", "u8", "f32", 5e-5),
        ("llama", "bf16", "bf16", "bf16", 4e-4),
        ("qwen2", "bf16", "bf16", "bf16", 4e-4),
        ("llama", "u8", "u8", "bf16", 4e-4),
    ],
)
def test_numbers_stay_near_those_of_f32_through_surgery(
    model: str, keys: str, values: str, inference: str, bound: float
) -> None:
    """KL of every decoded token, in nats, to a session of f32 that did the same. It is not nought: the type is real."""
    ids, seen = tokens(60), []
    for backend in (opened("f32", "f32", "f32", model), opened(keys, values, inference, model)):
        backend.prefill(ids[:50], 0)
        backend.evict(4, 20)
        backend.shift(20, 50, -16)
        logits = [forced(backend, ids[50:], 50)]
        backend.truncate(55)
        logits.append(forced(backend, tokens(5, seed=8), 55))
        seen.append(np.concatenate(logits))
    assert 1e-12 < kl(*seen) < bound


@pytest.mark.parametrize(("keys", "values"), [("u8", "u8"), ("f16", "f16")])
def test_chunks_are_part_of_the_result(keys: str, values: str) -> None:
    """The first call sees its own rows before they are rounded: the session's `chunk` is on record for that."""
    ids = tokens(40)
    by_chunk = {}
    for chunk in (8, 16, 40):
        first, again = (opened(keys, values, chunk=chunk) for _ in range(2))
        by_chunk[chunk] = first.prefill(ids, 0).logits
        np.testing.assert_array_equal(by_chunk[chunk], again.prefill(ids, 0).logits)
        assert first.config.chunk == chunk
    assert not np.array_equal(by_chunk[8], by_chunk[40])
    assert kl(by_chunk[40][None], by_chunk[8][None]) < 5e-5


@pytest.mark.parametrize(("keys", "inference"), [("u8", "f32"), ("bf16", "bf16")])
def test_attention_is_scored_over_the_rows_as_they_are_kept(keys: str, inference: str) -> None:
    """Of 40 queries by row, masses up to 18, to the float64 oracle, whose keys were never rounded."""
    ids = tokens(40)
    backend = opened(keys, keys, inference, options={"scores": "on"})
    oracle = ScoredOracle(OracleModel(tiny_path(MODEL)))
    backend.prefill(ids, 0)
    oracle.prefill(ids, 0)
    taken = backend.take_mass()
    assert_mass(taken, oracle.take(), 0.04)
    np.testing.assert_allclose(taken.mass.sum(axis=1), 4 * 40, rtol=1e-6)


def one_level(rows: npt.NDArray[np.float32]) -> None:
    """One component, one level off."""
    rows[3, 0, 9] += (rows[3, 0].max() - rows[3, 0].min()) / 255


def neighbours(rows: npt.NDArray[np.float32]) -> None:
    """Two rows change places."""
    rows[[3, 4]] = rows[[4, 3]]


@pytest.mark.parametrize("wrong", [one_level, neighbours])
@pytest.mark.parametrize("part", ["keys", "values"])
@pytest.mark.parametrize("kept", ["u8", "bf16"])
def test_the_witness_shows_a_row_that_is_not_the_mirrors(
    kept: str, part: str, wrong: Callable[[npt.NDArray[np.float32]], None]
) -> None:
    backend = opened(kept, kept)
    backend.prefill(tokens(20), 0)
    rows = backend._state.rows
    given = {"keys": rows.keys.copy(), "values": rows.values.copy()}
    wrong(given[part][1])
    backend._state._engine().load(given["keys"], given["values"])
    seen = backend.witness()
    assert seen.mirror is not None
    for name in ("keys", "values"):
        differ = [
            np.flatnonzero((a != b).any(axis=1)).tolist()
            for a, b in zip(getattr(seen.rows, name), getattr(seen.mirror, name), strict=True)
        ]
        expected = [3] if wrong is one_level else [3, 4]
        assert differ == [[], expected if name == part else []]


def test_a_refused_write_of_u8_rows_is_fatal_and_no_more() -> None:
    """Too many heads; the process lives, and so does the sibling. Two sequences in one state are never written."""
    victim, sibling = opened("u8", "u8"), opened("u8", "u8")
    for backend in (victim, sibling):
        backend.prefill(tokens(12), 0)
    victim.abort_next()
    with pytest.raises(EngineFault) as caught:
        victim.evict(2, 5)
    assert caught.value.fatal_class is FatalClass.STATE_RESTORE_FAILED
    sibling.evict(2, 5)
    assert_whole(sibling)
    states = sibling._state._engine()
    assert {s.state.data.shape[0] for s in (*states._keys, *states._values)} == {1}


def proof(verdict: str, **other: str) -> ProofRow:
    """A certification of u8 rows for the tiny llama, here and now."""
    engine = tiny_engine("llama")
    place = {
        "fingerprint": engine.facts.fingerprint,
        "engine_version": engine.version,
        "machine": machine_class(),
        "subject": "k=u8,v=u8",
    }
    measure = Measure.judged("quality", "mean KL", 0.001, "nats", most=0.01)
    return ProofRow.model_validate(
        {"kind": "certification", "model": "tiny", "engine": "openvino", "day": "2026-11-30", "verdict": verdict}
        | {"measures": (measure,)}
        | place
        | other
    )


@pytest.mark.parametrize(
    ("rows", "may"),
    [
        ([], False),
        ([proof("pass")], True),
        ([proof("fail")], False),
        ([proof("pass"), proof("fail")], False),
        ([proof("pass", subject="k=u8,v=u8,inference=bf16")], False),
        ([proof("pass", engine_version="2025.0")], False),
        ([proof("pass", fingerprint="another")], False),
        ([proof("pass", machine="another")], False),
    ],
)
def test_u8_rows_are_cut_only_where_they_are_certified(
    rows: list[ProofRow], may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROOFS_VARIABLE, str(tmp_path / "proofs.json"))
    add_rows(rows)
    backend = opened("u8", "u8", model="llama", uncertified=False)
    backend.prefill(tokens(12), 0)
    assert [getattr(backend.capabilities, flag) for flag in SURGERY] == [may] * 4
    assert backend.capabilities.snapshot_state
    assert backend.capabilities.recompute_range
    if may:
        backend.evict(2, 5)
        assert backend.books() == (Segment(0, 2, 0), Segment(5, 7, 5))
        return
    for flag in SURGERY:
        assert "kvtape certify --model" in (backend.refusal(flag) or "")
    with pytest.raises(UnsupportedOperation, match="remove_middle is false: k=u8,v=u8"):
        backend.evict(2, 5)
    assert_whole(backend)


@pytest.mark.parametrize(("keys", "values"), [("u8", "u8"), ("bf16", "u8")])
def test_a_model_directory_keeps_the_same_types(keys: str, values: str) -> None:
    config = {"kv_type_k": keys, "kv_type_v": values, "cold_budget_tokens": 64}
    backend = tiny_ir_engine(MODEL, "f16").open(SessionConfig(n_ctx=256, chunk=16, **config, **ASKED))
    assert isinstance(backend, OpenVinoBackend)
    backend.prefill(tokens(30), 0)
    before = backend.witness()
    block = backend.export_block(5, 12)
    backend.evict(5, 12)
    backend.shift(12, 30, -7)
    assert_whole(backend)
    backend.shift(5, 23, 7)
    backend.admit(block, 5, 5)
    assert_whole(backend)
    for was, now in zip(before.rows.keys, backend.witness().rows.keys, strict=True):
        np.testing.assert_array_equal(was, now)


def test_exact_types_need_no_proof_to_be_cut() -> None:
    for kept in ("f32", "f16", "bf16"):
        able = opened(kept, kept, uncertified=False).capabilities
        assert [getattr(able, flag) for flag in SURGERY] == [True] * 4
    assert opened("u8", "u8", uncertified=True).capabilities.remove_middle


class U8Machine(Machine):
    config: ClassVar[dict[str, Any]] = {"kv_type_k": "u8", "kv_type_v": "u8"} | ASKED


class Bf16Machine(Machine):
    config: ClassVar[dict[str, Any]] = {"kv_type_k": "bf16", "kv_type_v": "u8"} | ASKED
    model = "qwen3"


for machine in (U8Machine, Bf16Machine):
    machine.TestCase.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
TestU8 = U8Machine.TestCase
TestBf16 = Bf16Machine.TestCase
