"""Whether an engine kept its promise over the steps that it served."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvtape.backends.reference.engines.engine import Contract
from kvtape.eval.engine_accuracy import EngineTrack, Step

__all__ = ["Verdict", "verdict_of"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`kept` None where the steps say nothing about the promise; `why` always says what was looked at."""

    kept: bool | None
    why: str


def verdict_of(track: EngineTrack) -> Verdict:
    """Of `track.info.contract`."""
    if not track.steps:
        return Verdict(None, "nothing was served")
    match track.info.contract:
        case Contract.EXACT:
            return _exact(track.steps, "step")
        case Contract.EXACT_IN_WINDOW:
            window = int(track.choice.options.get("window") or 0)
            within = [step for step in track.steps if step.context <= window]
            if not within:
                return Verdict(None, f"no step was within the window of {window} tokens")
            return _exact(within, "step within the window")
        case Contract.BOUNDED_KL:
            return _bounded(track)
        case Contract.CODEC_BOUNDED:
            return _coded(track)
        case Contract.TASK:
            return Verdict(None, "judged by its answers, not by how far its logits are from standard")


def _exact(steps: list[Step], what: str) -> Verdict:
    other = [step for step in steps if not step.identical]
    if not other:
        return Verdict(True, f"every {what} is standard to the bit ({len(steps)})")
    first = other[0]
    where = f"prompt {first.case}, step {first.step}"
    return Verdict(False, f"{len(other)} of {len(steps)} differ, first at {where}, by {first.difference:.3g}")


def _bounded(track: EngineTrack) -> Verdict:
    mean, bound = float(np.mean([step.kl for step in track.steps])), track.info.bound
    if bound is None:
        return Verdict(None, f"these options have no stated bound (mean KL {mean:.3g})")
    return Verdict(mean <= bound, f"mean KL {mean:.3g}, at most {bound:.3g} is promised")


def _coded(track: EngineTrack) -> Verdict:
    mean, bound = float(np.mean(track.cosines)), track.info.bound
    if bound is None:
        return Verdict(None, f"these options have no stated bound (mean cosine {mean:.4f})")
    return Verdict(mean >= bound, f"mean cosine of rows read back {mean:.4f}, at least {bound:.4g} is promised")
