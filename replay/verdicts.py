"""What follows from the runs of all targets together: agreement between backends, and numbers against the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvtape.backends.rounding import ROUND_TO_MULTIPLY
from kvtape.planner.layout import Layout, resident_ranges
from kvtape.replay.findings import Finding, Gate
from kvtape.replay.numbers import Agreement, compare_logits, kl_nats, merge
from kvtape.replay.references import References
from kvtape.replay.runner import SessionRun
from kvtape.replay.story import Divergence, Story
from kvtape.replay.targets import Target

__all__ = ["SessionNumbers", "below_gate", "between_backends", "rounding_notes", "session_numbers"]


@dataclass(frozen=True, slots=True)
class SessionNumbers:
    """One session on one target: the agreement, and the seq of the checkpoint that agrees least.

    `rounding`: of the reference with itself, rows rounded as the engine rounds them, at the same checkpoints; only
    where the gate has to know.
    """

    agreement: Agreement | None
    worst_seq: int | None
    rounding: Agreement | None = None


def between_backends(story: Story, targets: Sequence[Target], runs: Sequence[SessionRun]) -> Divergence | None:
    """The first event after which two backends' books differ: positions too where they carry evicts out alike."""
    for event in story.events:
        held = [(t, run.layouts[event.seq]) for t, run in zip(targets, runs, strict=True) if event.seq in run.layouts]
        for target, layout in held[1:]:
            finding = _differ(held[0][0], held[0][1], target, layout)
            if finding is not None:
                return story.diverged(event, target.spec, finding)
    return None


def session_numbers(references: References, gate: Gate, story: int, target: Target, run: SessionRun) -> SessionNumbers:
    """The logits that a run reached against the reference of its way.

    Where they alone are outside of the gate's limits, what rounding does there is computed too.
    """
    if not run.logits:
        return SessionNumbers(None, None)
    places = sorted(run.logits)
    at = (story, target.lineage_way, run.remove_tail, places)
    reference = references.logits(*at)
    engine = np.stack([run.logits[place] for place in places])
    worst = int(kl_nats(reference, engine).argmax())
    agreement, rounding = compare_logits(reference, engine), None
    if run.divergence is None and not gate.passes(agreement) and target.engine in ROUND_TO_MULTIPLY:
        rounding = merge(compare_logits(reference, rounded) for rounded in references.rounded(*at))
    return SessionNumbers(agreement, places[worst][0], rounding)


def below_gate(
    gate: Gate, target: Target, stories: Sequence[Story], numbers: Sequence[SessionNumbers]
) -> Divergence | None:
    """The finding of the first session whose logits fail the gate on this target; it names the worst checkpoint.

    `numbers` one a session, or empty where nothing was compared.
    """
    for story, session in zip(stories, numbers, strict=bool(numbers)):
        found = session.agreement
        if found is None or gate.passes(found, session.rounding):
            continue
        event = next(e for e in story.events if e.seq == session.worst_seq)
        mean_kl, top1 = gate.limits(found.checkpoints, session.rounding)
        beside = (
            f"two right evaluations of a quantised model differ by {gate.noise_floor_mean_kl:g}"
            if session.rounding is None
            else f"rounding alone moves the reference by {session.rounding.mean_kl:.4g} here"
        )
        what = (
            f"logits: mean KL {found.mean_kl:.4g} nats (at most {mean_kl:.4g}; {beside}), top-1 {found.top1:.3f} (at "
            f"least {top1:.3g}) over {found.checkpoints} checkpoints of session {story.session_id}; at worst "
            f"{found.max_kl:.4g} nats, here"
        )
        return story.diverged(event, target.spec, Finding(what))
    return None


def rounding_notes(
    gate: Gate, target: Target, stories: Sequence[Story], numbers: Sequence[SessionNumbers]
) -> Iterator[str]:
    """What is to be said of each session that passes only beside what rounding does there."""
    for story, session in zip(stories, numbers, strict=bool(numbers)):
        found, rounding = session.agreement, session.rounding
        if found is None or rounding is None or not gate.passes(found, rounding):
            continue
        mean_kl, top1 = gate.limits(found.checkpoints, rounding)
        yield (
            f"{target.spec}: session {story.session_id}: logits are a mean KL of {found.mean_kl:.4g} from the "
            f"reference (top-1 {found.top1:.3f}). Rounding rows to 8 bits, as {target.engine} does against packed "
            f"weights, alone moves the reference of this text by {rounding.mean_kl:.4g} (top-1 {rounding.top1:.3f}), "
            f"so the gate here is mean KL <= {mean_kl:.4g} and top-1 >= {top1:.3g}: numbers say less on such a text; "
            "positions, rows and tokens are held to what they always are"
        )


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
