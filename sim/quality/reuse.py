"""The bound on reuse: the fewest tokens that any policy has to prefill, first admissions only.

What was once on a conversation's tape could have been kept, even past a turn that took another way. So of each prompt
only what is behind the longest beginning that any earlier tape shares with it has to be computed, and its last token
where logits are wanted.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvtape.sim.world.script import Script, Step

__all__ = ["least_prefilled"]

Tokens = npt.NDArray[np.int64]


def least_prefilled(script: Script) -> int:
    """Tokens, over all of the conversation's prompts; generated ones are not among them."""
    tape: Tokens = np.empty(0, dtype=np.int64)
    branches: list[Tokens] = []
    saved: dict[int, Tokens] = {}
    least = 0
    for step in _steps(script):
        if step.kind == "snapshot":
            saved[step.n] = tape
        elif step.kind == "restore":
            tape = saved.get(step.n, tape)
        elif step.kind in ("prefix", "suffix", "generate"):
            tape = _grown(tape, step)
            known = [_common(tape, branch) for branch in branches]
            if step.kind != "generate":
                new = len(tape) - max(known, default=0)
                least += max(new, 1) if step.logits and len(tape) else new
            _keep(branches, tape, known)
    return least


def _steps(script: Script) -> Iterator[Step]:
    return (step for turn in script.turns for step in turn.steps)


def _grown(tape: Tokens, step: Step) -> Tokens:
    tokens = step.tokens if step.kind == "generate" else [t for s in step.stretches for t in s.tokens]
    more = np.array(tokens, dtype=np.int64)
    return more if step.kind == "prefix" else np.concatenate((tape[: step.at], more))


def _common(one: Tokens, other: Tokens) -> int:
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if differ.size else n


def _keep(branches: list[Tokens], tape: Tokens, known: list[int]) -> None:
    """`tape` among the `branches`, of which none is the beginning of another."""
    if any(n == len(tape) for n in known):
        return
    branches[:] = [b for b, n in zip(branches, known, strict=True) if n < len(b)]
    branches.append(tape)
