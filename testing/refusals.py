"""What every backend must refuse: bad tokens, positions, sizes and states, with nothing changed."""

from __future__ import annotations

from kvtape.backends.errors import ContextOverflow, InputRejected, StateRejected, UnsupportedOperation
from kvtape.planner.ranges import RangeSet
from kvtape.testing.bench import Bench

__all__ = ["bad_blocks", "bad_positions", "bad_snapshots", "bad_tokens", "context_overflow"]


def bad_tokens(bench: Bench) -> None:
    """Token ids outside the vocabulary, and no tokens at all, never reach the engine."""
    backend, good = bench.backend, bench.draw(6)
    bench.feed(good)
    for bad in (-1, backend.facts.n_vocab, 2**40):
        bench.refuses(f"prefill of token {bad}", lambda t=bad: backend.prefill([good[0], t], 6), InputRejected)  # type: ignore[misc]
        bench.refuses(
            f"decode_until of token {bad}",
            lambda t=bad: backend.decode_until(2, 99, 6, bench.logits, lambda _: t),  # type: ignore[misc]
            InputRejected,
        )
    bench.refuses("prefill of no tokens", lambda: backend.prefill([], 6), InputRejected)
    bench.refuses("rebuild with a token missing", lambda: backend.rebuild(RangeSet([(0, 3)]), good[:2]), InputRejected)
    bench.feed(bench.draw(2, 1))


def bad_positions(bench: Bench) -> None:
    """Positions that are taken, absent or negative are refused."""
    backend, more = bench.backend, bench.draw(3, 1)
    bench.feed(bench.draw(8))
    bench.refuses("prefill onto a tape position that is resident", lambda: backend.prefill(more, 7), InputRejected)
    bench.refuses(
        "decode of -1 tokens", lambda: backend.decode_until(-1, 99, 8, bench.logits, lambda _: 3), InputRejected
    )
    errors = (InputRejected, UnsupportedOperation)
    bench.refuses("truncate at -1", lambda: backend.truncate(-1), *errors)
    bench.refuses("evict of absent positions", lambda: backend.evict(6, 9), *errors)
    bench.refuses("evict of nothing", lambda: backend.evict(3, 3), *errors)
    bench.refuses("export_block of absent positions", lambda: backend.export_block(6, 9), *errors)
    bench.refuses("refill onto rows that are there", lambda: backend.refill(more, 8, 4), *errors)
    bench.feed(more)


def context_overflow(bench: Bench) -> None:
    """What does not fit is refused with both numbers; what fits exactly is taken."""
    backend = bench.backend
    room = backend.n_ctx
    bench.feed(bench.draw(room - 4))
    err = bench.refuses("prefill past n_ctx", lambda: backend.prefill(bench.draw(5), room - 4), ContextOverflow)
    if str(room) not in str(err) or str(room + 1) not in str(err):
        bench.fail(f"the overflow must name {room + 1} and {room}, it says: {err}")
    bench.feed(bench.draw(3, 1))
    run = backend.decode_until(5, room + 9, room - 1, bench.logits, lambda _: bench.tape[0])
    if run.stopped != "limit" or len(run.tokens) != 1:
        bench.fail(f"with one row free decode gave {len(run.tokens)} tokens, stopped={run.stopped!r}")


def bad_blocks(bench: Bench) -> None:
    """Damaged blocks, blocks for another place and things that are no block are refused before the engine sees them."""
    backend = bench.backend
    bench.feed(bench.draw(12))
    blob = bench.export(4, 8)
    bench.evict(4, 8)
    for what, bad in _damaged(blob).items():
        bench.refuses(f"admit of {what}", lambda b=bad: backend.admit(b, 4, 4), StateRejected)  # type: ignore[misc]
    bench.refuses("admit of a block at another tape position", lambda: backend.admit(blob, 3, 4), StateRejected)
    bench.admit(blob, 4, 4, 4)
    bench.refuses("admit of a block that is resident", lambda: backend.admit(blob, 4, 40), InputRejected)


def bad_snapshots(bench: Bench) -> None:
    """Damaged snapshots are refused and nothing was touched."""
    bench.feed(bench.draw(8))
    saved = bench.does("snapshot", bench.backend.snapshot, "snapshot_state")
    bench.feed(bench.draw(3, 1))
    for what, bad in _damaged(saved).items():
        bench.refuses(f"restore of {what}", lambda b=bad: bench.backend.restore(b), StateRejected)  # type: ignore[misc]


def _damaged(blob: bytes) -> dict[str, bytes]:
    middle = len(blob) // 2
    flipped = bytes([blob[middle] ^ 1])
    return {
        "nothing": b"",
        "a text": b"not a state",
        "half of it": blob[:middle],
        "one flipped bit": blob[:middle] + flipped + blob[middle + 1 :],
    }
