"""What every backend must do: one function a scenario, each on a session of its own."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from kvtape.backends.errors import (
    Cancelled,
    EngineFault,
    InputRejected,
    KvtapeError,
)
from kvtape.backends.protocol import Logits
from kvtape.planner.layout import next_cache_position
from kvtape.planner.ranges import RangeSet
from kvtape.testing.bench import Bench

__all__ = [
    "admit_append",
    "admit_in_a_closed_place",
    "admit_in_place",
    "cancel",
    "capabilities_and_reasons",
    "close",
    "decode",
    "evict",
    "fault",
    "open_empty",
    "prefill",
    "prefill_in_pieces",
    "rebuild",
    "refill",
    "shift",
    "snapshot_and_restore",
    "truncate",
    "two_sessions",
    "witness_changes_nothing",
]


def open_empty(bench: Bench) -> None:
    """A new session holds nothing and knows its model, its context and its sizes."""
    backend = bench.backend
    bench.check("open")
    if backend.n_ctx < bench.config.n_ctx:
        bench.fail(f"n_ctx {bench.config.n_ctx} was asked, {backend.n_ctx} is there")
    if not backend.name or not backend.engine_version or not backend.facts.fingerprint:
        bench.fail("name, engine_version and facts.fingerprint must say something")
    sizes = backend.kv_bytes()
    if sizes["resident"] != 0 or sizes["allocated"] < 0:
        bench.fail(f"an empty cache has kv_bytes {sizes}")
    bench.feed(bench.draw(6))
    one = backend.kv_bytes()["resident"]
    bench.feed(bench.draw(6, 1))
    if not 0 < one < backend.kv_bytes()["resident"]:
        bench.fail(f"kv_bytes resident is {one} for 6 tokens and {backend.kv_bytes()['resident']} for 12")


def capabilities_and_reasons(bench: Bench) -> None:
    """`refusal` gives a reason for each false flag, and none for a true one."""
    for name, value in dataclasses.asdict(bench.backend.capabilities).items():
        why = bench.backend.refusal(name)
        if value and why is not None:
            bench.fail(f"{name} is {value}, yet refusal({name!r}) says {why!r}")
        if value is False and not why:
            bench.fail(f"{name} is false, and refusal({name!r}) gives no reason")


def prefill(bench: Bench) -> None:
    """Tokens stand behind the last row, turn after turn."""
    bench.feed(bench.draw(5))
    bench.feed(bench.draw(1, 1))
    bench.feed(bench.draw(7, 2))


def prefill_in_pieces(bench: Bench) -> None:
    """More than a chunk is computed in pieces, and in pieces as in one the numbers are the same."""
    tokens = bench.draw(2 * bench.config.chunk + 3)
    computed = bench.feed(tokens)
    least = math.ceil(len(tokens) / bench.config.chunk)
    if computed.calls < least:
        bench.fail(f"{len(tokens)} tokens in {computed.calls} calls with chunk {bench.config.chunk}")
    twin = bench.twin()
    for token in tokens:
        twin.feed([token])
    bench.same_logits("a prefill in pieces against one token at a time", bench.logits, twin.logits)
    twin.close()


def decode(bench: Bench) -> None:
    """One call a token; the run ends at n, at the limit, or where nothing is chosen; same numbers as a prefill."""
    prompt, more = bench.draw(6), bench.draw(4, 1)
    bench.feed(prompt)
    first = bench.logits
    seen: list[Logits] = []

    def choose(logits: Logits) -> int | None:
        seen.append(logits.copy())
        return None

    run = bench.does("decode_until", lambda: bench.backend.decode_until(3, bench.backend.n_ctx, 6, first, choose))
    if run.stopped != "chosen_none" or run.tokens or not np.array_equal(seen[0], first):
        bench.fail(
            f"a choice of None gave {run.tokens}, stopped={run.stopped!r}; choose must see the given logits first"
        )
    run = bench.does("decode_until", lambda: bench.backend.decode_until(3, 6, 6, first, lambda _: more[0]))
    if run.stopped != "limit" or run.tokens:
        bench.fail(f"at the limit of 6 rows it gave {run.tokens}, stopped={run.stopped!r}")
    bench.check("decode_until that computed nothing")
    run = bench.decode(more)
    if run.calls != len(more):
        bench.fail(f"{len(more)} decoded tokens in {run.calls} calls, expected one each")
    twin = bench.twin()
    twin.feed([*prompt, *more])
    bench.same_logits("decoded tokens against the same tokens prefilled", run.logits, twin.logits)
    twin.close()


def truncate(bench: Bench) -> None:
    """The tail goes, the rest is not touched, and the freed positions are used again."""
    bench.feed(bench.draw(12))
    bench.truncate(9)
    bench.truncate(9)
    bench.feed(bench.draw(4, 1))
    bench.truncate(2)
    bench.feed(bench.draw(3, 2))
    bench.truncate(0)
    bench.feed(bench.draw(3, 3))


def evict(bench: Bench) -> None:
    """Rows of the middle, the beginning and the end go; the others stay where they are, bit for bit."""
    bench.feed(bench.draw(20))
    bench.evict(4, 8)
    bench.evict(0, 2)
    if bench.backend.capabilities.remove_tail:
        bench.evict(18, 20)
    bench.feed(bench.draw(3, 1))
    bench.evict(11, 12)
    bench.decode(bench.draw(2, 2))


def shift(bench: Bench) -> None:
    """Rows move down and up with their keys turned; a move and its opposite give the same rows."""
    bench.feed(bench.draw(14))
    if bench.backend.capabilities.remove_middle:
        bench.evict(4, 8)
        bench.shift(8, 14, -4)
    bench.shift(0, next_cache_position(bench.layout), 5)
    bench.shift(0, next_cache_position(bench.layout), -5)
    bench.feed(bench.draw(3, 1))
    end = next_cache_position(bench.layout)
    bench.refuses("shift below position 0", lambda: bench.backend.shift(0, end, -1), InputRejected)
    bench.refuses("shift onto other rows", lambda: bench.backend.shift(0, 2, 1), InputRejected)


def admit_in_place(bench: Bench) -> None:
    """Exported rows come back to their own place, and the session goes on as if they had never left."""
    tokens, more = bench.draw(16), bench.draw(4, 1)
    bench.feed(tokens)
    before = bench.image()
    blob = bench.export(4, 8)
    bench.evict(4, 8)
    bench.admit(blob, 4, 4, 4)
    if bench.backend.capabilities.remove_middle and bench.image() != before:
        bench.fail("rows that came back to their own place are not the rows that left")
    bench.feed(more)
    twin = bench.twin()
    twin.feed([*tokens, *more])
    bench.same_logits("after rows left and came back", bench.logits, twin.logits)
    twin.close()


def admit_append(bench: Bench) -> None:
    """Exported rows come back behind the last row, their keys turned."""
    bench.feed(bench.draw(16))
    blob = bench.export(4, 8)
    bench.evict(4, 8)
    bench.admit(blob, 4, 4, next_cache_position(bench.layout))
    bench.feed(bench.draw(2, 1))
    bench.evict(4, 8)


def admit_in_a_closed_place(bench: Bench) -> None:
    """A hole that was closed is opened again by a shift, and takes its rows back."""
    bench.feed(bench.draw(16))
    blob = bench.export(6, 9)
    bench.evict(6, 9)
    bench.shift(9, 16, -3)
    bench.refuses("admit onto rows that are there", lambda: bench.backend.admit(blob, 6, 6), InputRejected)
    bench.shift(6, 13, 3)
    bench.admit(blob, 6, 3, 6)
    bench.feed(bench.draw(2, 1))


def refill(bench: Bench) -> None:
    """Evicted tokens are computed again in their place, attending to the rows before it."""
    tokens = bench.draw(16)
    bench.feed(tokens)
    if bench.backend.capabilities.remove_middle:
        bench.evict(5, 9)
        bench.refill(5, 9, 5)
    else:
        bench.rebuild(RangeSet([(0, 9)]))
        bench.refill(9, 16, 9)
    twin = bench.twin()
    twin.feed(tokens)
    more = bench.draw(3, 1)
    bench.feed(more)
    twin.feed(more)
    bench.same_logits("after a refill with all rows before it there", bench.logits, twin.logits)
    twin.close()


def rebuild(bench: Bench) -> None:
    """The survivors are prefilled from position 0, exactly as a fresh session would; no survivors clear the cache."""
    bench.feed(bench.draw(16))
    kept = RangeSet([(0, 3), (7, 12)])
    bench.rebuild(kept)
    twin = bench.twin()
    twin.feed([bench.tape[p] for r in kept for p in range(r.start, r.stop)])
    bench.same_logits("a rebuild against a fresh prefill of the survivors", bench.logits, twin.logits)
    twin.close()
    cleared = bench.rebuild(RangeSet())
    if cleared.calls or cleared.tokens or cleared.logits.shape != (0,):
        bench.fail(f"a rebuild of nothing gave {cleared.calls} calls, logits {cleared.logits.shape}")
    bench.feed(bench.draw(3, 1))


def snapshot_and_restore(bench: Bench) -> None:
    """Everything comes back bit for bit, and live and restored sessions go on alike."""
    bench.feed(bench.draw(14))
    if bench.backend.capabilities.remove_middle:
        bench.evict(3, 6)
    saved = bench.does("snapshot", bench.backend.snapshot, "snapshot_state")
    bench.check("snapshot")
    layout, tape, rows = bench.layout, list(bench.tape), bench.image()
    more = bench.draw(4, 1)
    bench.feed(more)
    live = bench.logits
    bench.rebuild(RangeSet([(0, 2)]))
    bench.does("restore", lambda: bench.backend.restore(saved), "snapshot_state")
    bench.layout, bench.tape = layout, tape
    bench.check("restore")
    if bench.image() != rows:
        bench.fail("restored rows are not the rows of the snapshot")
    bench.feed(more)
    bench.same_logits("after a restore", bench.logits, live)


def cancel(bench: Bench) -> None:
    """A cancelled computation raises Cancelled at its start state, and is not fatal."""
    bench.feed(bench.draw(6))
    bench.backend.cancel()
    bench.refuses("a cancelled prefill", lambda: bench.backend.prefill(bench.draw(20, 1), 6), Cancelled)
    bench.feed(bench.draw(4, 2))


def fault(bench: Bench) -> None:
    """After a failure of the engine the session refuses everything but close."""
    backend = bench.backend
    abort_next = bench.abort_hook()
    bench.feed(bench.draw(6))
    abort_next()
    _raises(bench, "prefill after abort_next()", lambda: backend.prefill(bench.draw(2, 1), 6), EngineFault)
    again = {
        "prefill": lambda: backend.prefill(bench.draw(2, 1), 6),
        "decode_until": lambda: backend.decode_until(1, 99, 6, bench.logits, lambda _: 3),
        "rebuild": lambda: backend.rebuild(RangeSet([(0, 6)]), bench.tape),
    }
    for what, call in again.items():
        _raises(bench, f"{what} after a fault", call, KvtapeError)
    backend.close()


def close(bench: Bench) -> None:
    """Closing twice is fine; a closed session computes nothing."""
    bench.feed(bench.draw(4))
    bench.close()
    bench.close()
    _raises(bench, "prefill after close", lambda: bench.backend.prefill(bench.draw(2, 1), 4), KvtapeError)


def _raises(bench: Bench, what: str, call: object, error: type[Exception]) -> None:
    assert callable(call)
    try:
        call()
    except error:
        return
    except Exception as err:
        bench.fail(f"{what}: raised {type(err).__name__} ({err}), must raise {error.__name__}")
    bench.fail(f"{what}: was accepted, must raise {error.__name__}")


def witness_changes_nothing(bench: Bench) -> None:
    """Looking twice gives the same, and what is computed later is the same as without looking."""
    tokens, more = bench.draw(8), bench.draw(4, 1)
    twin = bench.twin()
    twin.backend.prefill(tokens, 0)
    unseen = twin.backend.prefill(more, 8).logits.copy()
    twin.close()
    bench.feed(tokens)
    if bench.image() != bench.image():
        bench.fail("two looks at the memory differ")
    bench.feed(more)
    bench.same_logits("with and without a look in between", bench.logits, unseen)


def two_sessions(bench: Bench) -> None:
    """Two sessions of one engine do not see each other."""
    other = bench.twin()
    bench.feed(bench.draw(8))
    other.feed(bench.draw(5, 1))
    bench.feed(bench.draw(3, 2))
    other.check("prefill in the other session")
    other.close()
    bench.check("close of the other session")
