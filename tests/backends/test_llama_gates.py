"""Every flag of every configuration on llama.cpp, by what only this engine can be asked: exact rows, wrong answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pytest

from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.llama.blob import parse_whole
from kvtape.backends.llama.gates import KeyStore, gates_of, memory_facts
from kvtape.backends.llama.native import NativeModel
from kvtape.backends.llama.proof import prove
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import Witness
from kvtape.backends.rounding import ROUNDING
from kvtape.planner.capabilities import Capabilities
from support.capability_table import FULL, NO_SHIFT, ROWS, Row
from support.llama_tiny import image, model_file, prefilled, rotate, session, tokens


@dataclass(frozen=True)
class Case:
    """A configuration and the whole struct it must report. f32 rows and a cold budget unless `config` differs."""

    name: str
    arch: str
    expected: Capabilities
    shape: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)

    def prefilled(self, n: int) -> tuple[LlamaBackend, Any]:
        return prefilled(n, self.arch, config=self.config, **self.shape)


def _shape(row: Row) -> dict[str, Any]:
    return {key: value for key, value in row.model.items() if key != "arch"}


CASES = [
    Case(row.name, row.model.get("arch", "llama"), row.expected, _shape(row), dict(row.config))
    for row in ROWS
    if row.engine == "llama" and row.model.get("arch") != "latent"
]
FLAGS = tuple(f.name for f in fields(Capabilities) if isinstance(f.default, bool) and f.name != "sparse_attention")
TRUE = [(case, flag) for case in CASES for flag in FLAGS if getattr(case.expected, flag)]
FALSE = [(case, flag) for case in CASES for flag in FLAGS if not getattr(case.expected, flag)]


def ids(pairs: list[tuple[Case, str]]) -> list[str]:
    return [f"{case.name}-{flag}" for case, flag in pairs]


def test_a_name_that_is_no_capability_is_refused() -> None:
    backend = session()
    with pytest.raises(UsageError, match=r"no capability; known: .*remove_tail"):
        backend.refusal("teleport")
    backend.close()


# -- true flags: executed --------------------------------------------------------------------------------------------


def next_logits(backend: LlamaBackend, tape_start: int) -> Any:
    """Two tokens more, so that the engine uses the same kernel as in a prefill."""
    return backend.prefill(tokens(2, seed=9), tape_start).logits


def all_rows(seen: Witness) -> list[Any]:
    """Keys of every layer, then values."""
    return [*seen.rows.keys, *seen.rows.values]


def close_rows(case: Case) -> float:
    """How far rows computed another way may be off: exact but for what the stored type rounds."""
    return 1e-5 if case.config.get("kv_type_k", "f32") == "f32" else 2e-2


def assert_close_rows(found: Any, expected: Any, case: Case) -> None:
    """To `close_rows` a number; packed rows to one rounding a row."""
    rounding = max(ROUNDING[case.config.get(f"kv_type_{part}", "f32")] for part in "kv")
    if rounding < ROUNDING["q8_0"]:
        np.testing.assert_allclose(found, expected, atol=close_rows(case))
        return
    apart = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert np.max(apart) <= rounding


def prove_remove_tail(case: Case) -> None:
    backend, _ = case.prefilled(60)
    backend.truncate(40)
    fresh, _ = case.prefilled(40)
    assert image(backend)[0] == image(fresh)[0]
    np.testing.assert_array_equal(next_logits(backend, 40), next_logits(fresh, 40))


def prove_remove_middle(case: Case) -> None:
    backend, _ = case.prefilled(60)
    before = backend.witness()
    backend.evict(20, 30)
    after = backend.witness()
    assert sorted(after.cache_positions) == [*range(20), *range(30, 60)]
    kept = np.isin(before.cache_positions, after.cache_positions)
    for old, new in zip(all_rows(before), all_rows(after), strict=True):
        np.testing.assert_array_equal(old[kept], new)
    untouched, _ = case.prefilled(60)
    assert np.max(np.abs(next_logits(backend, 60) - next_logits(untouched, 60))) > 1e-3


def prove_position_shift(case: Case) -> None:
    backend, _ = case.prefilled(60)
    before = backend.witness()
    backend.evict(20, 30)
    backend.shift(30, 60, -10)
    after = backend.witness()
    assert sorted(after.cache_positions) == list(range(50))
    old, new = (np.argsort(w.cache_positions) for w in (before, after))
    for keys_before, keys_after in zip(before.rows.keys, after.rows.keys, strict=True):
        np.testing.assert_array_equal(keys_before[old][:20], keys_after[new][:20])
        head_dim = backend._shape.head_dim_k
        moved = rotate(keys_before[old][30:], -10, head_dim=head_dim, interleaved=case.arch == "llama")
        assert_close_rows(keys_after[new][20:], moved, case)
    for values_before, values_after in zip(before.rows.values, after.rows.values, strict=True):
        np.testing.assert_array_equal(np.delete(values_before[old], slice(20, 30), axis=0), values_after[new])


def prove_cold_store(case: Case) -> None:
    backend, _ = case.prefilled(60)
    before = image(backend)
    block = backend.export_block(20, 30)
    assert image(backend) == before
    backend.evict(20, 30)
    backend.admit(block, 20, 20)
    assert image(backend) == before
    dense, _ = case.prefilled(60)
    np.testing.assert_array_equal(next_logits(backend, 60), next_logits(dense, 60))


def prove_recompute_range(case: Case) -> None:
    backend, _ = case.prefilled(60)
    before = backend.witness()
    backend.evict(20, 30)
    computed = backend.refill(tokens(60)[20:30], 20, 20)
    assert (computed.calls, computed.tokens) == (1, 10)
    after = backend.witness()
    old, new = (np.argsort(w.cache_positions) for w in (before, after))
    for left, right in zip(
        (*before.rows.keys, *before.rows.values), (*after.rows.keys, *after.rows.values), strict=True
    ):
        assert_close_rows(right[new], left[old], case)
    dense, _ = case.prefilled(60)
    np.testing.assert_allclose(next_logits(backend, 60), next_logits(dense, 60), atol=close_rows(case))


def prove_snapshot_state(case: Case) -> None:
    backend, _ = case.prefilled(60)
    if case.expected.remove_middle:
        backend.evict(20, 30)
    saved = backend.snapshot()
    books = backend.books()
    on = [next_logits(backend, 60)]
    backend.restore(saved)
    assert backend.books() == books
    assert backend.snapshot() == saved
    on.append(next_logits(backend, 60))
    other = session(case.arch, config=case.config, **case.shape)
    other.restore(saved)
    on.append(next_logits(other, 60))
    np.testing.assert_array_equal(on[0], on[1])
    np.testing.assert_array_equal(on[0], on[2])


def prove_attention_scores(case: Case) -> None:
    """What a probe says its tokens would pay is what they pay when they come; no attention is lost."""
    backend, _ = case.prefilled(60)
    backend.evict(20, 30)
    backend.take_mass()
    probe = backend.score(tokens(70)[60:], 60)
    backend.prefill(tokens(70)[60:], 60)
    real = backend.take_mass()
    assert probe.tape_positions.tolist() == [*range(20), *range(30, 60)]
    assert real.tape_positions.tolist() == [*range(20), *range(30, 70)]
    np.testing.assert_array_equal(probe.mass, real.mass[:, :50])
    np.testing.assert_allclose(real.mass.sum(axis=1), 2 * 10, rtol=1e-5)


PROOFS: dict[str, Callable[[Case], None]] = {
    "remove_tail": prove_remove_tail,
    "remove_middle": prove_remove_middle,
    "position_shift": prove_position_shift,
    "cold_store": prove_cold_store,
    "recompute_range": prove_recompute_range,
    "snapshot_state": prove_snapshot_state,
    "attention_scores": prove_attention_scores,
}


@pytest.mark.parametrize(("case", "flag"), TRUE, ids=ids(TRUE))
def test_true_flags_are_executed(case: Case, flag: str) -> None:
    PROOFS[flag](case)


def test_the_window_is_what_the_engine_applies() -> None:
    """One windowed layer: rows 64 and more positions back change nothing, the row 63 back does."""
    logits = {}
    for gone in (None, 36, 37):
        backend, _ = prefilled(100, "gemma3", n_layer=1, config={"options": {"swa_full": "yes"}})
        assert backend.capabilities.sliding_window_attention_tokens == 64
        if gone is not None:
            backend.evict(gone, gone + 1)
        logits[gone] = backend.prefill(tokens(1, seed=9), 100).logits
    np.testing.assert_array_equal(logits[None], logits[36])
    assert np.max(np.abs(logits[None] - logits[37])) > 1e-4


def test_windowed_layers_are_rotated_too() -> None:
    backend, _ = prefilled(50, "gemma3", config={"options": {"swa_full": "yes"}})
    before = parse_whole(backend._memory.save())[1]
    backend.evict(20, 30)
    backend.shift(30, 50, -10)
    after = parse_whole(backend._memory.save())[1]
    assert sorted(after.positions) == list(range(40))
    assert len(after.keys) == 5
    old, new = np.argsort(before.positions), np.argsort(after.positions)
    for keys_before, keys_after in zip(before.keys, after.keys, strict=True):
        moved = rotate(keys_before.numbers()[old][30:], -10, head_dim=32, interleaved=False)
        np.testing.assert_allclose(keys_after.numbers()[new][20:], moved, atol=1e-5)


def test_a_model_with_windowed_layers_alone_cannot_shift() -> None:
    """Its full cache has no layers, and the engine aborts when it rotates nothing; opening must not try."""
    backend, _ = prefilled(50, "gemma3", n_layer=1, config={"options": {"swa_full": "yes"}})
    assert not backend.capabilities.position_shift
    with pytest.raises(UnsupportedOperation, match="has no layers"):
        backend.shift(30, 50, 10)


# -- false flags: refused, nothing changed ---------------------------------------------------------------------------


ATTEMPTS: dict[str, Callable[[LlamaBackend], Any]] = {
    "remove_tail": lambda backend: backend.truncate(40),
    "remove_middle": lambda backend: backend.evict(20, 30),
    "position_shift": lambda backend: backend.shift(30, 60, 5),
    "cold_store": lambda backend: backend.export_block(20, 30),
    "recompute_range": lambda backend: backend.refill(tokens(5), 60, 60),
    "attention_scores": lambda backend: backend.score(tokens(5), 60),
}


@pytest.mark.parametrize(("case", "flag"), FALSE, ids=ids(FALSE))
def test_false_flags_refuse_and_change_nothing(case: Case, flag: str) -> None:
    backend, _ = case.prefilled(60)
    before, books = backend.snapshot(), backend.books()
    with pytest.raises(UnsupportedOperation, match=f"{flag} is false: ") as caught:
        ATTEMPTS[flag](backend)
    assert str(backend.refusal(flag)) in str(caught.value)
    assert backend.books() == books
    assert backend.snapshot() == before


def test_no_mass_is_taken_without_scores() -> None:
    backend, _ = prefilled(10)
    with pytest.raises(UnsupportedOperation, match=r"attention_scores is false: .*scores=on"):
        backend.take_mass()


@pytest.mark.parametrize("name", ["mamba", "lfm2"])
def test_memories_without_rows_have_no_witness(name: str) -> None:
    backend, _ = prefilled(20, name)
    with pytest.raises(UnsupportedOperation, match="no row for each token"):
        backend.witness()


def test_admit_elsewhere_needs_a_shift() -> None:
    backend, _ = prefilled(60, "llama", yarn=4)
    block = backend.export_block(20, 30)
    backend.evict(20, 30)
    before = image(backend)
    with pytest.raises(UnsupportedOperation, match=r"position_shift is false: .*yarn"):
        backend.admit(block, 20, 60)
    assert image(backend) == before
    backend.admit(block, 20, 20)


# -- the gates are not under-reporting: what they forbid really is wrong -----------------------------------------------


def test_a_recurrent_memory_says_it_removed_and_did_not() -> None:
    backend, _ = prefilled(60, "mamba")
    before = backend.snapshot()
    assert backend._context.remove(0, 20, 30)
    assert backend.snapshot() == before


def test_a_shift_under_yarn_changes_keys_that_do_not_move() -> None:
    backend, _ = prefilled(60, "llama", yarn=4)
    before = backend.witness().rows.keys[1]
    backend._memory.remove(20, 30)
    backend._memory.shift(30, 60, -10)
    after = backend._memory.read().keys[1].numbers()
    ratio = np.linalg.norm(after[:20], axis=1) / np.linalg.norm(before[:20], axis=1)
    np.testing.assert_allclose(ratio, 1 + 0.1 * np.log(4), rtol=1e-4)


def test_a_windowed_cache_loses_rows_that_a_truncation_would_need() -> None:
    backend, _ = prefilled(450, "gemma3")
    held = backend._memory.windowed_positions()
    needed = np.arange(100 - 63, 100)
    assert len(np.setdiff1d(needed, held)) > 0


def test_what_a_full_windowed_cache_overwrote_is_noticed() -> None:
    backend, _ = prefilled(400, "gemma3", config={"options": {"swa_full": "yes"}})
    backend.evict(4, 360)
    backend.prefill(tokens(400, seed=1), 400)
    lost = np.setdiff1d(np.arange(360, 800), backend._memory.windowed_positions())
    assert len(lost) > 0, "the engine no longer reuses places outside the window; the check can go"
    before = image(backend)
    with pytest.raises(UnsupportedOperation, match="were overwritten"):
        backend.truncate(int(lost[-1]) + 2)
    assert image(backend) == before
    backend.truncate(790)


def test_the_proof_at_open_finds_yarn_without_the_gate() -> None:
    """Were the metadata silent about scaling, executing a shift would still find it."""
    model = NativeModel(str(model_file("llama", yarn=4)))
    facts = replace(memory_facts(model), rope_factor=None)
    gates = gates_of(facts, keys=KeyStore("f32"), cold_budget=1, can_shift=True)
    assert gates.capabilities == FULL
    backend = session("llama", yarn=4)
    proven = prove(gates, facts, backend._memory, backend._decoder, backend.facts.n_vocab)
    assert proven.capabilities == NO_SHIFT
    assert "found when the session opened" in str(proven.refusal("position_shift"))
    backend.close()
    model.close()
