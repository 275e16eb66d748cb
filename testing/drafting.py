"""What a backend must do that looks at drafts: several proposed tokens in one call, and no trace of those given up."""

from __future__ import annotations

import numpy as np

from kvtape.backends.errors import Cancelled, ContextOverflow, InputRejected, UnsupportedOperation
from kvtape.backends.protocol import Logits
from kvtape.backends.verifying import Verifier
from kvtape.planner import layout as lay
from kvtape.testing.bench import Bench, NotApplicable

__all__ = ["refused_with_scores", "verify", "verify_undone"]


def verify(bench: Bench) -> None:
    """Each token's logits are those it has alone; whatever number of them stays, the rows of the others are gone."""
    backend = _verifier(bench)
    bench.feed(bench.draw(6))
    for kept in (4, 2, 0, 1):
        tokens, start = bench.draw(4, 1 + kept), len(bench.tape)
        twin = bench.twin()
        twin.feed(bench.tape)
        seen: list[Logits] = []

        def keep(each: Logits, kept: int = kept, seen: list[Logits] = seen) -> int:
            seen.append(each.copy())
            return kept

        what = f"verify of {len(tokens)} tokens of which {kept} stay"
        done = bench.does(what, lambda t=tokens, s=start, k=keep: backend.verify(t, s, k))  # type: ignore[misc]
        if (done.kept, done.calls, len(seen)) != (kept, 1, 1) or seen[0].shape != (len(tokens), len(twin.logits)):
            bench.fail(f"{what}: kept {done.kept} in {done.calls} calls, asked {len(seen)} times")
        bench.tape += tokens[:kept]
        if kept:
            bench.layout = lay.append(bench.layout, start, kept, lay.next_cache_position(bench.layout))
        bench.check(what)
        for token, logits in zip(tokens, seen[0], strict=True):
            twin.feed([token])
            bench.same_logits(f"{what}: logits after a token against the token alone", logits, twin.logits)
        twin.close()
        if kept and not np.array_equal(done.logits, seen[0][kept - 1]):
            bench.fail(f"{what}: its logits are not those after the last token that stays")
    bench.decode(bench.draw(2, 9))


def verify_undone(bench: Bench) -> None:
    """Refused, cancelled, or ended by the one who keeps: the state is that of the start."""
    backend = _verifier(bench)
    bench.feed(bench.draw(6))
    tokens = bench.draw(4, 1)

    def raising(_: Logits) -> int:
        raise KeyError("keep")

    def some(each: Logits) -> int:
        return len(each)

    bench.refuses("verify whose keep raises", lambda: backend.verify(tokens, 6, raising), KeyError)
    bench.refuses("verify that keeps 5 of 4", lambda: backend.verify(tokens, 6, lambda _: 5), InputRejected)
    bench.refuses("verify that keeps -1", lambda: backend.verify(tokens, 6, lambda _: -1), InputRejected)
    bench.refuses("verify of nothing", lambda: backend.verify([], 6, some), InputRejected)
    bench.refuses("verify on taken positions", lambda: backend.verify(tokens, 3, some), InputRejected)
    many = bench.draw(bench.config.chunk + 1, 2)
    bench.refuses("verify of more than a call", lambda: backend.verify(many, 6, some), InputRejected)
    bench.backend.cancel()
    bench.refuses("cancelled verify", lambda: backend.verify(tokens, 6, some), Cancelled)
    room = bench.backend.n_ctx
    while room - len(bench.tape) >= bench.config.chunk:
        bench.feed(bench.draw(bench.config.chunk, 3))
    start = len(bench.tape)
    over = bench.draw(room - start + 1, 4)
    bench.refuses("verify past the context", lambda: backend.verify(over, start, lambda _: 0), ContextOverflow)
    bench.decode(bench.draw(1, 5))


def refused_with_scores(bench: Bench) -> None:
    """What rejected tokens attended to would count: where attention is counted, nothing is verified."""
    if not isinstance(bench.backend, Verifier):
        raise NotApplicable("the backend does not look at drafts")
    backend = bench.backend
    bench.feed(bench.draw(6))
    if not backend.verify_refusal():
        bench.fail("verify_refusal gives no reason although attention_scores is true")
    tokens = bench.draw(3, 1)
    bench.refuses("verify with scores=on", lambda: backend.verify(tokens, 6, lambda _: 0), UnsupportedOperation)


def _verifier(bench: Bench) -> Verifier:
    backend = bench.backend
    if not isinstance(backend, Verifier):
        raise NotApplicable("the backend does not look at drafts")
    if (why := backend.verify_refusal()) is not None:
        bench.refuses("verify", lambda: backend.verify(bench.draw(2), 0, lambda _: 0), UnsupportedOperation)
        raise NotApplicable(f"the backend refuses drafts here: {why}")
    return backend
