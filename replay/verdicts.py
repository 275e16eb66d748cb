"""What follows from the runs of all targets together: agreement between backends, and numbers against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvtape.planner.layout import Layout, resident_ranges
from kvtape.replay.dense import DenseModel, reference_logits
from kvtape.replay.findings import Finding, Gate
from kvtape.replay.lineage import Lineage
from kvtape.replay.numbers import Agreement, compare_logits, kl_nats, merge
from kvtape.replay.runner import SessionRun
from kvtape.replay.story import Divergence, Story
from kvtape.replay.targets import Target
from kvtape.replay.weights import Weights

__all__ = ["SessionNumbers", "below_gate", "between_backends", "session_numbers"]


@dataclass(frozen=True, slots=True)
class SessionNumbers:
    """One session on one target: the agreement, and the seq of the checkpoint that agrees least."""

    agreement: Agreement | None
    worst_seq: int | None


def between_backends(story: Story, targets: Sequence[Target], runs: Sequence[SessionRun]) -> Divergence | None:
    """The first event after which two backends' books differ: positions too where they carry evicts out alike."""
    for event in story.events:
        held = [(t, run.layouts[event.seq]) for t, run in zip(targets, runs, strict=True) if event.seq in run.layouts]
        for target, layout in held[1:]:
            finding = _differ(held[0][0], held[0][1], target, layout)
            if finding is not None:
                return story.diverged(event, target.spec, finding)
    return None


def session_numbers(weights: Weights, runs: Sequence[SessionRun]) -> list[SessionNumbers]:
    """Each run's logits against its own lineage's reference; runs with one lineage share one forward."""
    forwards: list[tuple[Lineage, list[int]]] = []
    for i, run in enumerate(runs):
        if run.lineage is None or not run.logits:
            continue
        group = next((members for lineage, members in forwards if _same(lineage, run.lineage)), None)
        if group is None:
            forwards.append((run.lineage, [i]))
        else:
            group.append(i)
    out = [SessionNumbers(None, None) for _ in runs]
    for lineage, members in forwards:
        wanted = np.unique([runs[i].slots[c] for i in members for c in runs[i].logits])
        reference = reference_logits(DenseModel(weights), lineage, wanted)
        for i in members:
            out[i] = _compare(runs[i], wanted, reference)
    return out


def below_gate(
    gate: Gate, target: Target, stories: Sequence[Story], numbers: Sequence[SessionNumbers]
) -> Divergence | None:
    """The finding of a target whose logits, over all sessions, fail the gate; it names the worst checkpoint."""
    total = merge(n.agreement for n in numbers)
    if total is None or (total.mean_kl <= gate.mean_kl and total.top1 >= gate.top1):
        return None
    known = [(n.agreement.max_kl, i) for i, n in enumerate(numbers) if n.agreement is not None]
    worst = max(known)[1]
    seq = numbers[worst].worst_seq
    event = next(e for e in stories[worst].events if e.seq == seq)
    what = (
        f"logits: mean KL {total.mean_kl:.4g} nats (at most {gate.mean_kl:g}; two right evaluations of a quantised "
        f"model differ by {gate.noise_floor_mean_kl:g}), top-1 {total.top1:.3f} (at least {gate.top1:g}) over "
        f"{total.checkpoints} checkpoints; the worst, {total.max_kl:.4g} nats, is here"
    )
    return stories[worst].diverged(event, target.spec, Finding(what))


def _differ(a: Target, layout_a: Layout, b: Target, layout_b: Layout) -> Finding | None:
    tape_a, tape_b = resident_ranges(layout_a), resident_ranges(layout_b)
    if tape_a != tape_b:
        what = f"between backends: {a.spec} and {b.spec} hold different tape positions"
        return Finding(what, tuple(tape_a.as_pairs()), tuple(tape_b.as_pairs()))
    if a.way == b.way and layout_a != layout_b:
        what = f"between backends: {a.spec} and {b.spec} hold the same tokens at different cache positions"
        return Finding(what, _cache(layout_a), _cache(layout_b))
    return None


def _cache(layout: Layout) -> tuple[tuple[int, int], ...]:
    return tuple((s.cache_start, s.cache_stop) for s in layout)


def _compare(run: SessionRun, wanted: npt.NDArray[np.int64], reference: npt.NDArray[np.float32]) -> SessionNumbers:
    places = sorted(run.logits)
    rows = np.searchsorted(wanted, [run.slots[c] for c in places])
    engine = np.stack([run.logits[c] for c in places])
    worst = int(kl_nats(reference[rows], engine).argmax())
    return SessionNumbers(compare_logits(reference[rows], engine), places[worst][0])


def _same(a: Lineage, b: Lineage) -> bool:
    if not (np.array_equal(a.tokens, b.tokens) and len(a.epochs) == len(b.epochs)):
        return False
    return all(
        (x.first, x.n, x.position) == (y.first, y.n, y.position)
        and np.array_equal(x.keys, y.keys)
        and np.array_equal(x.key_positions, y.key_positions)
        for x, y in zip(a.epochs, b.epochs, strict=True)
    )
