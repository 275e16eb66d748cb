"""What a llama.cpp session computes: determinism, placement, layouts, refill, tokens and text."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.errors import ContextOverflow, InputRejected, SessionClosed, UnsupportedOperation, UsageError
from kvtape.backends.llama.engine import LlamaEngine
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import Backend, Choose, Engine, Logits, SessionConfig
from kvtape.planner.layout import Segment
from kvtape.planner.ranges import RangeSet
from support.llama_tiny import engine, image, model_file, prefilled, session, tokens
from support.tiny_gguf import BOS, EOS, write_tiny


def teacher(forced: list[int]) -> Choose:
    remaining = iter(forced)
    return lambda logits: next(remaining)


def greedy(logits: Logits) -> int:
    return int(np.argmax(logits))


def test_it_is_an_engine_and_a_backend() -> None:
    loaded: Engine = engine()
    opened: Backend = loaded.open(SessionConfig(n_ctx=256))
    assert opened.facts == loaded.facts
    assert loaded.facts.arch == "llama"
    assert loaded.facts.n_vocab == 320
    assert loaded.facts.n_ctx_train == 4096
    assert EOS in loaded.facts.end_tokens
    assert BOS not in loaded.facts.end_tokens
    opened.close()


@pytest.mark.parametrize(("asked", "effective"), [(1, 256), (255, 256), (1000, 1024), (1024, 1024), (1025, 1280)])
def test_effective_context(asked: int, effective: int) -> None:
    backend = session(config={"n_ctx": asked})
    assert backend.n_ctx == effective
    assert backend.config.n_ctx == asked


def test_the_context_is_full_at_n_ctx_and_the_engine_agrees() -> None:
    backend, computed = prefilled(511, config={"n_ctx": 512})
    run = backend.decode_until(5, 10_000, 511, computed.logits, greedy)
    assert (len(run.tokens), run.calls, run.stopped) == (1, 1, "limit")
    with pytest.raises(ContextOverflow, match="513 tokens do not fit a context of 512"):
        backend.prefill(tokens(1), 512)
    backend.shift(500, 512, 3)  # the flush of a full context needs room for its own token
    assert len(backend.witness().cache_positions) == 512
    backend.evict(0, 500)
    backend.prefill(tokens(500), 512)
    assert len(backend.witness().cache_positions) == 512


@pytest.mark.parametrize("chunk", [2, 3, 16, 59, 60, 512])
@pytest.mark.parametrize("n_ubatch", ["2", "7", "128"])
def test_pieces_do_not_matter(chunk: int, n_ubatch: str) -> None:
    """Bit-equal while every piece has two tokens or more; a single token takes another kernel."""
    whole, expected = prefilled(60, config={"chunk": 512})
    pieced, computed = prefilled(60, config={"chunk": chunk, "options": {"n_ubatch": n_ubatch}})
    assert computed.calls == -(-60 // chunk)
    assert computed.tokens == 60
    single = 60 % chunk == 1 or 1 in {60 % int(n_ubatch), chunk % int(n_ubatch)}
    if single:
        np.testing.assert_allclose(computed.logits, expected.logits, atol=1e-5)
    else:
        np.testing.assert_array_equal(computed.logits, expected.logits)
        assert image(pieced) == image(whole)


def test_chunk_of_one() -> None:
    _, expected = prefilled(20)
    _, computed = prefilled(20, config={"chunk": 1})
    assert computed.calls == 20
    np.testing.assert_allclose(computed.logits, expected.logits, atol=1e-5)


def test_threads_do_not_matter() -> None:
    one, first = prefilled(60, config={"threads": 1})
    two, second = prefilled(60, config={"threads": 2})
    np.testing.assert_array_equal(first.logits, second.logits)
    assert image(one) == image(two)


def test_decode_reports_its_run() -> None:
    backend, computed = prefilled(20)
    run = backend.decode_until(6, 512, 20, computed.logits, greedy)
    assert (len(run.tokens), run.calls, run.stopped) == (6, 6, "n")
    again, start = prefilled(20)
    forced = again.decode_until(6, 512, 20, start.logits, teacher(list(run.tokens)))
    assert forced.tokens == run.tokens
    np.testing.assert_array_equal(forced.logits, run.logits)
    assert image(backend) == image(again)
    assert backend.books() == (Segment(0, 26, 0),)


@pytest.mark.parametrize(
    ("n", "limit", "choose", "stopped", "calls"),
    [
        (0, 512, greedy, "n", 0),
        (5, 20, greedy, "limit", 0),
        (5, 22, greedy, "limit", 2),
        (5, 25, greedy, "n", 5),
        (5, 512, lambda logits: None, "chosen_none", 0),
    ],
)
def test_why_a_run_ends(n: int, limit: int, choose: Choose, stopped: str, calls: int) -> None:
    backend, computed = prefilled(20)
    run = backend.decode_until(n, limit, 20, computed.logits, choose)
    assert (run.stopped, run.calls, len(run.tokens)) == (stopped, calls, calls)
    if not calls:
        np.testing.assert_array_equal(run.logits, computed.logits)


def test_layouts_follow_the_protocol() -> None:
    backend, _ = prefilled(40)
    block = backend.export_block(10, 20)
    backend.evict(10, 20)
    assert backend.books() == (Segment(0, 10, 0), Segment(20, 20, 20))
    backend.shift(20, 40, -10)
    assert backend.books() == (Segment(0, 10, 0), Segment(20, 20, 10))
    backend.admit(block, 10, 30)
    assert backend.books() == (Segment(0, 10, 0), Segment(20, 20, 10), Segment(10, 10, 30))
    backend.prefill(tokens(5), 40)
    assert backend.books()[-1] == Segment(40, 5, 40)
    backend.truncate(15)
    assert backend.books() == (Segment(0, 10, 0), Segment(10, 5, 30))
    assert sorted(backend.witness().cache_positions) == [*range(10), *range(30, 35)]


def test_a_block_admitted_elsewhere_has_rotated_keys() -> None:
    """There and back again: twice rotated keys are the old ones, values never change."""
    backend, _ = prefilled(40)
    before = backend.witness()
    block = backend.export_block(10, 20)
    backend.evict(10, 20)
    backend.admit(block, 10, 100)
    moved = backend.export_block(10, 20)
    backend.evict(10, 20)
    backend.admit(moved, 10, 10)
    after = backend.witness()
    for old, new in zip(before.rows.keys, after.rows.keys, strict=True):
        np.testing.assert_allclose(new[np.argsort(after.cache_positions)], old, atol=1e-5)
        assert not np.array_equal(new[np.argsort(after.cache_positions)], old)
    for old, new in zip(before.rows.values, after.rows.values, strict=True):
        np.testing.assert_array_equal(new[np.argsort(after.cache_positions)], old)


def test_pending_shifts_add_up_and_are_applied_before_anything_reads() -> None:
    backend, _ = prefilled(40)
    backend.evict(0, 4)
    backend.shift(4, 40, -2)
    backend.shift(2, 38, -2)
    once, _ = prefilled(40)
    once.evict(0, 4)
    once.shift(4, 40, -4)
    settled = image(once)
    assert backend.export_block(10, 20) == once.export_block(10, 20)
    assert image(backend) == settled


def test_one_layer_evict_and_shift_equal_a_fresh_prefill() -> None:
    """Rows of one layer do not depend on each other, so this comparison is exact."""
    backend, _ = prefilled(40, n_layer=1)
    backend.evict(10, 20)
    backend.shift(20, 40, -10)
    fresh = session(n_layer=1)
    fresh.prefill(tokens(40)[:10] + tokens(40)[20:], 0)
    shifted = backend.prefill(tokens(2, seed=5), 40).logits
    np.testing.assert_allclose(shifted, fresh.prefill(tokens(2, seed=5), 30).logits, atol=1e-5)


def test_rebuild_of_nothing_clears_the_cache() -> None:
    backend, first = prefilled(20)
    computed = backend.rebuild(RangeSet(), [])
    assert (computed.calls, computed.tokens, computed.logits.size) == (0, 0, 0)
    assert backend.books() == ()
    assert backend.witness().cache_positions.size == 0
    assert np.array_equal(backend.prefill(tokens(20), 0).logits, first.logits)


def test_rebuild_is_a_prefill_of_the_survivors() -> None:
    backend, _ = prefilled(40)
    survivors = [*tokens(40)[:10], *tokens(40)[20:]]
    computed = backend.rebuild(RangeSet([(0, 10), (20, 40)]), survivors)
    assert backend.books() == (Segment(0, 10, 0), Segment(20, 20, 10))
    fresh = session()
    expected = fresh.prefill(survivors, 0)
    np.testing.assert_array_equal(computed.logits, expected.logits)
    assert image(backend)[1:] == image(fresh)[1:]


@pytest.mark.parametrize("arch", ["mamba", "lfm2", "gemma3"])
def test_every_memory_can_be_rebuilt_and_emptied(arch: str) -> None:
    backend, _ = prefilled(40, arch)
    fresh = session(arch)
    expected = fresh.prefill(tokens(10), 0)
    computed = backend.rebuild(RangeSet([(0, 10)]), tokens(10))
    np.testing.assert_array_equal(computed.logits, expected.logits)
    backend.truncate(0)
    assert backend.books() == ()
    np.testing.assert_array_equal(backend.prefill(tokens(10), 0).logits, expected.logits)


def test_refill_fills_a_hole_at_the_start_and_in_pieces() -> None:
    backend, _ = prefilled(40, config={"chunk": 5})
    dense = image(backend)
    backend.evict(0, 10)
    computed = backend.refill(tokens(40)[:10], 0, 0)
    assert (computed.calls, computed.tokens) == (2, 10)
    assert image(backend) == dense


def test_refill_needs_its_left_neighbour() -> None:
    backend, _ = prefilled(40)
    backend.evict(10, 20)
    before = image(backend)
    with pytest.raises(UnsupportedOperation, match="row at cache position 14 is not resident"):
        backend.refill(tokens(40)[15:20], 15, 15)
    assert image(backend) == before
    backend.refill(tokens(40)[10:15], 10, 10)
    backend.refill(tokens(40)[15:20], 15, 15)


def test_refill_attends_only_to_what_lies_below() -> None:
    """Its rows are those of a dense prefill even though later rows are resident."""
    backend, _ = prefilled(40)
    backend.evict(10, 20)
    computed = backend.refill(tokens(40)[10:20], 10, 10)
    dense = session()
    np.testing.assert_allclose(computed.logits, dense.prefill(tokens(40)[:20], 0).logits, atol=1e-5)


def test_snapshot_survives_what_comes_after() -> None:
    backend, _ = prefilled(40)
    backend.evict(10, 20)
    saved, before = backend.snapshot(), image(backend)
    backend.prefill(tokens(30, seed=3), 40)
    backend.truncate(5)
    backend.restore(saved)
    assert image(backend) == before


def test_a_snapshot_puts_the_live_rows_in_position_order() -> None:
    """Otherwise later rows would land elsewhere than after a restore, and sums would differ in their last bits."""
    backend, _ = prefilled(40)
    backend.evict(5, 15)
    backend.prefill(tokens(20, seed=3), 40)
    before = image(backend)
    assert list(backend.witness().cache_positions) != sorted(backend.witness().cache_positions)
    saved = backend.snapshot()
    assert list(backend.witness().cache_positions) == [*range(5), *range(15, 60)]
    assert image(backend) == before
    other = session()
    other.restore(saved)
    np.testing.assert_array_equal(
        backend.prefill(tokens(9, seed=4), 60).logits, other.prefill(tokens(9, seed=4), 60).logits
    )


def test_snapshot_of_an_empty_session() -> None:
    backend = session()
    saved = backend.snapshot()
    backend.prefill(tokens(10), 0)
    backend.restore(saved)
    assert backend.books() == ()
    assert len(backend.witness().cache_positions) == 0
    assert [k.shape for k in backend.witness().rows.keys] == [(0, 32), (0, 32)]
    assert backend.kv_bytes()["resident"] == 0


@pytest.mark.parametrize("kv_type", ["f16", "bf16", "f32"])
def test_kv_bytes_are_those_of_the_engine(kv_type: str) -> None:
    backend, _ = prefilled(40, config={"kv_type_k": kv_type, "kv_type_v": kv_type})
    row = 2 * 2 * 32 * (4 if kv_type == "f32" else 2)
    assert backend.kv_bytes() == {"resident": 40 * row, "allocated": (512 + 256) * row}
    logged = backend._context.words.allocated_bytes  # MiB with two decimals
    assert abs(logged - (512 + 256) * row) <= 0.0051 * 2**20


@pytest.mark.parametrize("arch", ["mamba", "lfm2", "gemma3"])
def test_kv_bytes_of_other_memories(arch: str) -> None:
    backend = session(arch)
    assert backend.kv_bytes()["resident"] == 0
    backend.prefill(tokens(40), 0)
    assert 0 < backend.kv_bytes()["resident"] < backend.kv_bytes()["allocated"]


# -- text ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "the cache", "Grüße, 日本 🦙", "a\0b", "<|im_end|>", "x" * 20_000])
def test_any_text_round_trips(text: str) -> None:
    ids = engine().tokenize(text)
    assert engine().detokenize(ids) == text
    assert not set(ids) & engine().facts.end_tokens, "special tokens must not come out of plain text"


def test_text_that_is_no_unicode() -> None:
    with pytest.raises(InputRejected, match="character 1"):
        engine().tokenize("a\udc80")
    with pytest.raises(InputRejected, match="token 320 is not in the vocabulary of 320"):
        engine().detokenize([5, 320])
    assert engine().detokenize([3 + 0xE6, 3 + 0x97]) == "\ufffd"


# -- what cannot be opened -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"n_ctx": 0}, "n_ctx is 0"),
        ({"n_ctx": 2**30}, "n_ctx is 1073741824"),
        ({"n_ctx": 2**24}, "GiB of cache"),
        ({"chunk": 0}, "chunk is 0"),
        ({"threads": 0}, "threads is 0"),
        ({"threads": 513}, "threads is 513"),
        ({"cold_budget_tokens": -1}, "cold_budget_tokens is -1"),
        ({"kv_type_k": "u8"}, "kv_type_k u8: this backend opens bf16, f16, f32, iq4_nl, q4_0, q4_1, q5_0, q5_1, q8_0"),
        ({"kv_type_v": "q8"}, "did you mean 'q8_0'"),
        ({"kv_type_v": "q4_0"}, "kv_type_v q4_0: llama.cpp packs values only under flash attention; ask for"),
        (
            {"options": {"swa": "yes"}},
            "unknown option of llama 'swa'.*allowed: memory, n_ubatch, scores, shift_quantised, swa_full",
        ),
        ({"options": {"swa_full": "maybe"}}, "allowed: yes, no"),
        ({"options": {"n_ubatch": "0"}}, "n_ubatch=0"),
        ({"options": {"n_ubatch": "many"}}, "n_ubatch=many"),
    ],
)
def test_what_cannot_be_opened(config: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        session(n_layer=2, n_embd=1024, n_head=32, n_head_kv=32, config={"kv_type_k": "f16", **config})


def test_files_that_are_no_models(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(model_file().read_bytes()[:300_000])
    with pytest.raises(Exception, match=r"broken\.gguf") as caught:
        LlamaEngine.load(path)
    assert getattr(caught.value, "exit_code", None) in (2, 3)
    with pytest.raises(UsageError, match="no such model file"):
        LlamaEngine.load(path.with_name("none.gguf"))
    with pytest.raises(UsageError, match="unknown option of llama 'x'"):
        LlamaEngine.load(model_file(), {"x": "1"})


def test_closing_an_engine_closes_its_sessions() -> None:
    own = LlamaEngine.load(model_file(), {"n_ubatch": "16"})
    backend = own.open(SessionConfig(n_ctx=256))
    assert backend.config.options == {"n_ubatch": "16"}
    own.close()
    own.close()
    for use in (lambda: backend.prefill([5], 0), backend.books, backend.kv_bytes, lambda: own.tokenize("x")):
        with pytest.raises(SessionClosed):
            use()
    backend.close()


def test_a_session_that_is_dropped_frees_its_context() -> None:
    backend = session()
    free = backend._context._free
    backend.books()
    del backend
    gc.collect()
    assert not free.alive


def test_sessions_of_one_engine_do_not_meet() -> None:
    left, right = session(), session()
    first = left.prefill(tokens(20), 0)
    right.prefill(tokens(30, seed=4), 0)
    again = session()
    np.testing.assert_array_equal(again.prefill(tokens(20), 0).logits, first.logits)
    assert isinstance(left, LlamaBackend)
    assert len(left.witness().cache_positions) == 20


def test_the_same_call_writes_the_same_model(tmp_path: Path) -> None:
    first, second = (write_tiny(tmp_path / f"same-{i}.gguf", "qwen3", seed=3).read_bytes() for i in range(2))
    assert first == second
    assert first != write_tiny(tmp_path / "other.gguf", "qwen3", seed=4).read_bytes()
    with pytest.raises(ValueError, match="cannot write a tiny 'gpt5'; known: gemma2, gemma3, gpt-oss, lfm2, llama"):
        write_tiny(tmp_path / "no.gguf", "gpt5")
