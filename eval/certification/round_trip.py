"""Round trips: a range out to the cold store and back in its place, and the whole state saved and restored.

Nothing is computed while the range is out, so what follows must be what would have followed.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kvtape.backends.envelope import unwrap
from kvtape.backends.proofs.rows import Ability, Measure
from kvtape.backends.protocol import Logits
from kvtape.eval.certification.bench import Bench, kl_of_logits, logits_of
from kvtape.eval.certification.thresholds import judged

__all__ = ["range_round_trip", "snapshot_round_trip"]

_BLOCK: Final = 32
_POLICY: Final = f"none:block={_BLOCK}"
_ROOM: Final = 64
_CONTINUED: Final = 4
"""Tokens that are computed behind a snapshot, and again behind its restore."""


def range_round_trip(bench: Bench) -> list[Measure]:
    """A block from the middle of the tape: its bytes before and after, and the logits behind it.

    Raises UnsupportedOperation where there is no cold store, and what sessions raise.
    """
    n = bench.smoke.sizes.range_tokens
    start = n // 2 // _BLOCK * _BLOCK
    tokens, following = bench.smoke.tokens[:n], bench.smoke.tokens[n]
    with bench.opened(_POLICY, n + _ROOM, cold_tokens=n) as (session, backend):
        session.ensure_prefix(tokens)
        before = backend.export_block(start, start + _BLOCK)
        session.evict(start, start + _BLOCK)
        for block_id, _, _ in session.explain().cold:
            session.admit(block_id)
        after = backend.export_block(start, start + _BLOCK)
        session.prefill_suffix([following])
        returned = logits_of(session)
    with bench.opened(_POLICY, n + _ROOM, cold_tokens=n) as (session, _):
        session.ensure_prefix(tokens)
        session.prefill_suffix([following])
        untouched = logits_of(session)
    return [judged("round_trip", "changed_bytes", _changed(before, after)), *_same("round_trip", untouched, returned)]


def snapshot_round_trip(bench: Bench) -> list[Measure]:
    """The logits of the same tokens behind a snapshot, and behind its restore.

    Raises UnsupportedOperation where there are no snapshots, and what sessions raise.
    """
    n = bench.smoke.sizes.range_tokens - _CONTINUED
    tokens, following = bench.smoke.tokens[:n], bench.smoke.tokens[n : n + _CONTINUED]
    with bench.opened(_POLICY, n + _ROOM) as (session, _):
        session.ensure_prefix(tokens)
        saved = session.snapshot()
        session.prefill_suffix(following)
        first = logits_of(session)
        session.restore(saved)
        session.prefill_suffix(following)
        second = logits_of(session)
    return _same("snapshot", first, second)


def _same(ability: Ability, one: Logits, other: Logits) -> list[Measure]:
    equal = Measure.judged(ability, "identical_logits", float(np.array_equal(one, other)), "0 or 1")
    return [judged(ability, "kl", kl_of_logits(one, other)), equal]


def _changed(before: bytes, after: bytes) -> int:
    """Bytes of the engine's state that differ; a difference in length counts as well."""
    (_, one), (_, other) = unwrap(before, {}), unwrap(after, {})
    a, b = np.frombuffer(one, np.uint8), np.frombuffer(other, np.uint8)
    shared = min(len(a), len(b))
    return int((a[:shared] != b[:shared]).sum()) + abs(len(a) - len(b))
