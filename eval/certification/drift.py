"""Shift drift: what a storage type costs after its keys were rotated many times.

A text streams through a small context under the rebased policy, a few tokens evicted at a time, so that each key that
stays is rotated once for every eviction behind it. A type that rounds what it stores rounds again with each rotation;
8-bit keys bear that, 4-bit keys drift until they point nowhere, bf16 keys abort llama.cpp at the first shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvtape.backends.proofs.rows import Measure
from kvtape.eval.certification.bench import Bench
from kvtape.eval.certification.quality import Predictions, compared, predict
from kvtape.eval.certification.thresholds import judged
from kvtape.eval.nll import force
from kvtape.eval.targets import NullSink
from kvtape.planner.events import Event, Op

__all__ = ["Drifted", "shift_measures", "stream_rebased"]

_SINK: Final = 4
_AT_ONCE: Final = 4
"""Tokens that one eviction frees."""


class Drifted(NullSink):
    """Counts the shifts that pass to the log."""

    shifts = 0

    def see(self, event: Event) -> None:
        self.shifts += event.op is Op.SHIFT


def stream_rebased(bench: Bench, options: Sequence[tuple[str, str]]) -> tuple[Predictions, int]:
    """The last `shift_scored` tokens of the stream, and how many shifts there were before the last of them.

    Raises UnsupportedOperation where keys cannot be rotated, and what sessions raise.
    """
    smoke, sizes = bench.smoke, bench.smoke.sizes
    recent = sizes.shift_context - _SINK - _AT_ONCE
    policy = f"stream:sink={_SINK},recent={recent},positions=rebased,block=1"
    sink = Drifted()
    with bench.opened(policy, sizes.shift_context, options=options, sink=sink) as (session, _):
        session.ensure_prefix(smoke.tokens[: sizes.shift_context - _AT_ONCE])
        scored = sizes.shift_tokens - sizes.shift_scored
        force(session, smoke.tokens[sizes.shift_context - _AT_ONCE : scored])
        return predict(session, smoke.tokens[scored : sizes.shift_tokens]), sink.shifts


def shift_measures(best: Predictions, other: Predictions, shifts: int) -> list[Measure]:
    """Against the same stream with the best precision, rotated as often."""
    delta, kl, top1 = compared(best, other)
    return [
        judged("shift", "nll_delta", delta),
        judged("shift", "kl", kl),
        judged("shift", "top1", top1),
        Measure.judged("shift", "shifts", shifts, "shifts"),
    ]
