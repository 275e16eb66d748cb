"""Bad input changes nothing, a cancelled operation leaves its start state, a failed engine is never used again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvtape.backends.envelope import unwrap, wrap
from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    EngineFault,
    FatalClass,
    InputRejected,
    KvtapeError,
    SessionClosed,
    StateRejected,
)
from kvtape.backends.llama.context import SCRATCH
from kvtape.backends.llama.session import LlamaBackend
from kvtape.planner.ranges import RangeSet
from support.llama_tiny import image, prefilled, session, tokens

Act = Callable[[LlamaBackend], Any]


def holed() -> LlamaBackend:
    """40 tokens without [10, 20)."""
    backend, _ = prefilled(40)
    backend.evict(10, 20)
    return backend


def logits_of(backend: LlamaBackend) -> Any:
    return np.zeros(backend.facts.n_vocab, np.float32)


BAD_INPUT: dict[str, tuple[type[KvtapeError], str, Act]] = {
    "negative token": (InputRejected, "token -1 at index 1", lambda b: b.prefill([5, -1], 40)),
    "token past the vocabulary": (InputRejected, "token 320 at index 0", lambda b: b.prefill([320], 40)),
    "token past 64 bits": (InputRejected, "integers", lambda b: b.prefill([2**80], 40)),
    "token that is no integer": (InputRejected, "integers", lambda b: b.prefill([5.5], 40)),  # type: ignore[list-item]
    "nested tokens": (InputRejected, "dimensions", lambda b: b.prefill([[5, 6]], 40)),  # type: ignore[list-item]
    "no tokens": (InputRejected, "no tokens", lambda b: b.prefill([], 40)),
    "resident tape position": (InputRejected, "overlaps", lambda b: b.prefill([5], 39)),
    "negative tape position": (InputRejected, "positions must be", lambda b: b.prefill([5], -1)),
    "huge tape position": (InputRejected, "positions must be", lambda b: b.prefill([5], 2**40)),
    "more than the context": (ContextOverflow, "530 tokens", lambda b: b.prefill(tokens(500), 40)),
    "bad chosen token": (InputRejected, "token 999", lambda b: b.decode_until(3, 512, 40, logits_of(b), lambda _: 999)),
    "negative count": (
        InputRejected,
        "cannot decode",
        lambda b: b.decode_until(-1, 512, 40, logits_of(b), lambda _: 5),
    ),
    "decode over the tape": (InputRejected, "overlaps", lambda b: b.decode_until(1, 512, 5, logits_of(b), lambda _: 5)),
    "evict what is gone": (InputRejected, "not one run", lambda b: b.evict(12, 15)),
    "evict across a hole": (InputRejected, "not one run", lambda b: b.evict(5, 25)),
    "evict nothing": (InputRejected, "not one run", lambda b: b.evict(5, 5)),
    "evict backwards": (InputRejected, "not one run", lambda b: b.evict(6, 5)),
    "export across a hole": (InputRejected, "not one run", lambda b: b.export_block(5, 25)),
    "shift below zero": (InputRejected, "bad segment", lambda b: b.shift(0, 10, -1)),
    "shift onto others": (InputRejected, "overlaps", lambda b: b.shift(20, 40, -11)),
    "shift nothing": (InputRejected, "no row", lambda b: b.shift(10, 20, 1)),
    "truncate below zero": (InputRejected, "cannot truncate", lambda b: b.truncate(-1)),
    "refill onto rows": (InputRejected, "overlaps", lambda b: b.refill(tokens(11), 10, 10)),
    "refill a bad token": (InputRejected, "token -1", lambda b: b.refill([-1], 10, 10)),
    "rebuild other ranges": (
        InputRejected,
        "3 tokens for ranges of 4",
        lambda b: b.rebuild(RangeSet([(0, 4)]), [5] * 3),
    ),
    "rebuild too much": (ContextOverflow, "513", lambda b: b.rebuild(RangeSet([(0, 513)]), tokens(513))),
    "admit garbage": (StateRejected, "not a kvtape state", lambda b: b.admit(b"x" * 99, 10, 10)),
    "admit a snapshot": (StateRejected, "kind", lambda b: b.admit(b.snapshot(), 10, 10)),
    "restore garbage": (StateRejected, "not a kvtape state", lambda b: b.restore(b"")),
    "restore a block": (StateRejected, "kind", lambda b: b.restore(b.export_block(0, 5))),
}


@pytest.mark.parametrize("what", sorted(BAD_INPUT))
def test_bad_input_changes_nothing(what: str) -> None:
    error, message, act = BAD_INPUT[what]
    backend = holed()
    before = image(backend)
    with pytest.raises(error, match=message):
        act(backend)
    assert image(backend) == before
    assert backend.decode_until(1, 512, 40, logits_of(backend), lambda _: 5).tokens == (5,)


def test_a_bad_choice_late_in_a_run_takes_the_run_back() -> None:
    backend = holed()
    before = image(backend)
    choices = iter([5, 6, 7, 400])
    with pytest.raises(InputRejected, match="token 400"):
        backend.decode_until(9, 512, 40, logits_of(backend), lambda _: next(choices))
    assert image(backend) == before


# -- saved states that are not ours ----------------------------------------------------------------------------------


def block_and_hole() -> tuple[LlamaBackend, bytes]:
    backend, _ = prefilled(40)
    block = backend.export_block(10, 20)
    backend.evict(10, 20)
    return backend, block


@pytest.mark.parametrize("at", [0, 9, 40, 1000, -40, -1])
def test_a_flipped_bit_is_found(at: int) -> None:
    backend, block = block_and_hole()
    before, damaged = image(backend), bytearray(block)
    damaged[at] ^= 0x10
    with pytest.raises(StateRejected):
        backend.admit(bytes(damaged), 10, 10)
    assert image(backend) == before


@pytest.mark.parametrize(
    ("other", "entry"),
    [
        ({"seed": 1}, "fingerprint"),
        ({"arch": "qwen2"}, "fingerprint"),
        ({"n_layer": 1}, "fingerprint"),
        ({"config": {"kv_type_k": "f16"}}, "kv_type_k"),
        ({"config": {"kv_type_v": "f16"}}, "kv_type_v"),
        ({"config": {"flash_attention": "on"}}, "flash_attention"),
    ],
)
def test_foreign_states(other: dict[str, Any], entry: str) -> None:
    backend, _ = block_and_hole()
    before = image(backend)
    foreign, _ = prefilled(40, **other)
    block, saved = foreign.export_block(10, 20), foreign.snapshot()
    with pytest.raises(StateRejected, match=entry):
        backend.admit(block, 10, 10)
    with pytest.raises(StateRejected, match=entry):
        backend.restore(saved)
    assert image(backend) == before


def test_a_state_of_another_context_size_is_refused_a_block_is_not() -> None:
    backend, _ = block_and_hole()
    larger, _ = prefilled(40, config={"n_ctx": 1024})
    with pytest.raises(StateRejected, match="n_ctx 1024"):
        backend.restore(larger.snapshot())
    backend.admit(larger.export_block(10, 20), 10, 10)
    whole, _ = prefilled(40)
    assert image(backend) == image(whole)


def rewrapped(envelope: bytes, change: Callable[[bytes], bytes], **entries: Any) -> bytes:
    """A valid envelope around another payload: what only the engine can find."""
    header, payload = unwrap(envelope, {})
    return wrap({**header, **entries}, change(payload))


@pytest.mark.parametrize(
    ("change", "entries", "message"),
    [
        (lambda p: p[:-100], {}, "does not accept"),
        (lambda p: p[:50], {}, "does not accept"),
        (lambda p: b"", {}, "does not accept"),
        (lambda p: p + b"more", {}, "does not accept"),
        (lambda p: b"\0\0\0\0" + p[4:], {}, "does not accept"),
        (lambda p: p, {"cache_start": 100}, "do not stand at"),
        (lambda p: p, {"tokens": [5, 6], "n_tokens": 2}, "do not stand at"),
        (lambda p: p, {"tokens": [5, 6]}, "does not name its 10 tokens"),
        (lambda p: p, {"start": 11}, "begins at tape position 11"),
        (lambda p: p, {"start": -1}, "start -1"),
    ],
)
def test_a_block_that_the_engine_refuses(
    change: Callable[[bytes], bytes], entries: dict[str, Any], message: str
) -> None:
    backend, block = block_and_hole()
    before = image(backend)
    with pytest.raises(StateRejected, match=message):
        backend.admit(rewrapped(block, change, **entries), 10, entries.get("cache_start", 10))
    assert image(backend) == before
    assert backend._context.position_max(SCRATCH) == -1
    backend.admit(block, 10, 10)


def test_admit_where_there_is_no_room() -> None:
    backend, _ = prefilled(512)
    block = backend.export_block(10, 20)
    backend.evict(10, 20)
    backend.prefill(tokens(5), 512)
    before = image(backend)
    with pytest.raises(ContextOverflow, match="517 tokens do not fit a context of 512"):
        backend.admit(block, 10, 10)
    assert image(backend) == before


# -- cancelling ------------------------------------------------------------------------------------------------------


CANCELLED: dict[str, Act] = {
    "prefill": lambda b: b.prefill(tokens(300, seed=7), 40),
    "refill": lambda b: b.refill(tokens(40)[10:20], 10, 10),
    "rebuild": lambda b: b.rebuild(RangeSet([(0, 400)]), tokens(400, seed=6)),
    "decode": lambda b: b.decode_until(300, 512, 40, logits_of(b), lambda _: 5),
}


def cancel_in_call(backend: LlamaBackend, n: int) -> None:
    """Cancel while the engine is in its `n`-th decode from now, so that its abort callback fires there."""
    decode, calls = backend._context.decode, iter(range(1, 10**6))

    def watched(*args: Any, **kwargs: Any) -> int:
        if next(calls) == n:
            backend.cancel()
            backend._context.decode = decode  # type: ignore[method-assign]
        return decode(*args, **kwargs)

    backend._context.decode = watched  # type: ignore[method-assign]


@pytest.mark.parametrize("what", sorted(CANCELLED))
def test_cancel_before_it_begins(what: str) -> None:
    backend = holed()
    before = image(backend)
    backend.cancel()
    with pytest.raises(Cancelled):
        CANCELLED[what](backend)
    assert image(backend) == before
    backend.prefill(tokens(3), 40)


@pytest.mark.parametrize("call", [1, 2, 5])
@pytest.mark.parametrize("arch", ["llama", "qwen2vl", "mamba", "lfm2", "gemma3"])
@pytest.mark.parametrize("what", ["prefill", "rebuild", "decode"])
def test_cancel_inside_the_engine(arch: str, what: str, call: int) -> None:
    """Memories other than one plain cache lose rows while they compute, and must go back to a copy."""
    backend, _ = prefilled(40, arch, config={"chunk": 16, "options": {"n_ubatch": "8"}})
    before, books = backend.snapshot(), backend.books()
    cancel_in_call(backend, call)
    with pytest.raises(Cancelled):
        CANCELLED[what](backend)
    assert backend.books() == books
    assert backend.snapshot() == before
    twin = session(arch, config={"chunk": 16, "options": {"n_ubatch": "8"}})
    twin.restore(before)
    np.testing.assert_array_equal(backend.prefill(tokens(6), 40).logits, twin.prefill(tokens(6), 40).logits)


def test_cancel_inside_a_refill() -> None:
    backend = holed()
    before = image(backend)
    cancel_in_call(backend, 1)
    with pytest.raises(Cancelled):
        CANCELLED["refill"](backend)
    assert image(backend) == before
    CANCELLED["refill"](backend)
    whole, _ = prefilled(40)
    assert image(backend) == image(whole)


def test_cancel_from_another_thread() -> None:
    backend = holed()
    before, started = image(backend), threading.Event()

    def choose(_: Any) -> int:
        started.set()
        return 5

    def run() -> None:
        for _ in range(1000):
            backend.decode_until(400, 512, 40, logits_of(backend), choose)
            backend.truncate(40)

    canceller = threading.Thread(target=lambda: started.wait(60) and backend.cancel())
    canceller.start()
    with pytest.raises(Cancelled):
        run()
    canceller.join()
    assert image(backend) == before


@pytest.mark.parametrize("call", [1, 2])
def test_a_stop_never_meets_a_pending_shift(call: int) -> None:
    """A decode stopped over a pending shift would rotate some layers twice; the flush before it cannot be stopped."""
    backend, twin = holed(), holed()
    backend.shift(20, 40, -10)
    twin.shift(20, 40, -10)
    expected = image(twin)
    cancel_in_call(backend, call)
    with pytest.raises(Cancelled):
        backend.prefill(tokens(20), 40)
    assert image(backend) == expected


def test_an_error_in_choose_takes_the_run_back() -> None:
    backend = holed()
    before = image(backend)
    choices = iter([5, 6])
    with pytest.raises(KeyboardInterrupt):
        backend.decode_until(9, 512, 40, logits_of(backend), lambda _: next(choices, None) or interrupt())
    assert image(backend) == before


def interrupt() -> int:
    raise KeyboardInterrupt


# -- the engine fails ------------------------------------------------------------------------------------------------


def assert_poisoned(backend: LlamaBackend, first: EngineFault) -> None:
    """Every call gives the first cause, and none reaches the engine."""
    backend._context._lib = None  # a native call would be an AttributeError
    uses: list[Act] = [
        lambda b: b.prefill([5], 100),
        lambda b: b.decode_until(1, 512, 100, logits_of(b), lambda _: 5),
        lambda b: b.truncate(1),
        lambda b: b.evict(0, 5),
        lambda b: b.shift(0, 5, 100),
        lambda b: b.export_block(0, 5),
        lambda b: b.admit(b"", 0, 0),
        lambda b: b.refill([5], 10, 10),
        lambda b: b.rebuild(RangeSet([(0, 1)]), [5]),
        lambda b: b.snapshot(),
        lambda b: b.restore(b""),
        lambda b: b.books(),
        lambda b: b.witness(),
        lambda b: b.kv_bytes(),
        lambda b: b.abort_next(),
    ]
    for use in uses:
        with pytest.raises(EngineFault) as caught:
            use(backend)
        assert caught.value is first


def free_once(backend: LlamaBackend) -> None:
    assert backend._context._free.alive
    backend.close()
    assert not backend._context._free.alive
    backend.close()
    with pytest.raises(SessionClosed):
        backend.books()


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda b: b.prefill(tokens(20), 40), FatalClass.PREFILL_FAILED),
        (lambda b: b.decode_until(3, 512, 40, logits_of(b), lambda _: 5), FatalClass.DECODE_FAILED),
        (lambda b: b.refill(tokens(40)[10:20], 10, 10), FatalClass.PREFILL_FAILED),
        (lambda b: b.rebuild(RangeSet([(0, 20)]), tokens(20)), FatalClass.PREFILL_FAILED),
    ],
)
def test_a_failed_computation_is_fatal(act: Act, expected: FatalClass) -> None:
    backend, sibling = holed(), holed()
    backend.abort_next()
    with pytest.raises(EngineFault, match="llama_decode returned 2") as caught:
        act(backend)
    assert caught.value.fatal_class == expected
    assert_poisoned(backend, caught.value)
    free_once(backend)
    sibling.prefill(tokens(5), 40)


def test_a_cancel_is_not_a_failure_even_with_an_abort_waiting() -> None:
    backend = holed()
    backend.abort_next()
    backend.cancel()
    with pytest.raises(Cancelled):
        backend.prefill(tokens(5), 40)
    with pytest.raises(EngineFault):
        backend.prefill(tokens(5), 40)


@pytest.mark.parametrize("arch", ["llama", "mamba", "lfm2", "gemma3"])
def test_a_failed_restore_is_fatal(arch: str) -> None:
    backend, _ = prefilled(40, arch)
    truncated = rewrapped(backend.snapshot(), lambda p: p[:-100])
    with pytest.raises(EngineFault, match="does not accept the saved state") as caught:
        backend.restore(truncated)
    assert caught.value.fatal_class == FatalClass.STATE_RESTORE_FAILED
    assert_poisoned(backend, caught.value)
    free_once(backend)


def test_a_restored_state_with_other_positions_is_fatal() -> None:
    backend, _ = prefilled(40)
    saved = backend.snapshot()
    header, _ = unwrap(saved, {})
    (tape_start, cache_start, ids) = header["segments"][0]
    lie = rewrapped(saved, bytes, segments=[[tape_start, cache_start + 1, ids]])
    with pytest.raises(EngineFault, match="engine and books differ") as caught:
        backend.restore(lie)
    assert caught.value.fatal_class == FatalClass.STATE_RESTORE_FAILED


def test_a_full_native_cache_is_allocator_exhausted() -> None:
    """768 cells; 260 of them taken by rows that the books do not know of, so 12 more do not fit beside 500."""
    backend, _ = prefilled(500)
    assert backend._context.decode(np.full(260, 5, np.int32), 0, SCRATCH, want_logits=False) == 0
    with pytest.raises(EngineFault, match="llama_decode returned 1") as caught:
        backend.prefill(tokens(12), 500)
    assert caught.value.fatal_class == FatalClass.ALLOCATOR_EXHAUSTED


def test_an_engine_that_forgets_a_row_is_found_at_the_next_operation() -> None:
    backend, _ = prefilled(40)
    assert backend._context.remove(0, 7, 8)
    with pytest.raises(EngineFault, match="the engine holds") as caught:
        backend.prefill(tokens(5), 40)
    assert_poisoned(backend, caught.value)
