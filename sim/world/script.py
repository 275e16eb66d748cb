"""What one conversation asks for, turn by turn: the part of a log that no policy changes.

Tokens are the log's (teacher-forced). What was decided and carried out is left behind, but for what the caller asked
for by name (an evict, an admit): those steps are marked `asked`, and only the recorded policy repeats them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from kvtape.planner.blocks import DEFAULT_BLOCK, CacheClass
from kvtape.planner.rows import SessionRow
from kvtape.sim.quality.attention import AttentionMap

__all__ = ["Script", "Step", "StepKind", "Stretch", "Turn", "begin_alike"]

StepKind = Literal[
    "prefix", "suffix", "compute", "generate", "snapshot", "restore", "evict", "admit", "compact", "policy", "plan"
]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens of one segment of a prompt."""

    kind: str
    cache_class: CacheClass
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One call of the caller. `until`: the log's first event behind it; what was measured of it stands before that.

    prefix     `stretches` are the whole prompt; `logits`: whether its last token had to be computed
    suffix     `stretches` go behind a tape of `at` tokens
    compute    what waits was computed before anything was generated
    generate   `n` were asked for, `tokens` came
    snapshot, restore   `n` is the snapshot's number
    evict      tape positions `[at, at + n)`; admit   block `n`, `in_place` or not
    policy     `text` rules from here on; plan   planning was asked for, down to `n`
    """

    kind: StepKind
    n: int = 0
    at: int = 0
    tokens: tuple[int, ...] = ()
    stretches: tuple[Stretch, ...] = ()
    logits: bool = True
    in_place: bool = True
    text: str = ""
    asked: bool = False
    until: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """`at_ns`: when it came, from the log's first event. `think_ns`: since the turn before ended.

    `tape`: what was on the tape before it, so that a conversation that lost its cache can go on.
    """

    number: int
    at_ns: int
    think_ns: int
    steps: tuple[Step, ...]
    tape: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True)
class Script:
    """One recorded session. `ended`: how it ended: close, fatal, lost or open. `skipped`: calls that left no effect.

    `evict_by`: native or recompute, `defer_prefill`: whether prompts waited for a decode, both as recorded.
    `attention`: the dense attention of its tape; where there is none, `no_attention` says why.
    """

    row: SessionRow
    turns: tuple[Turn, ...]
    ended: str
    skipped: int
    evict_by: str
    n_vocab: int
    defer_prefill: bool = False
    attention: AttentionMap | None = field(default=None, compare=False)
    no_attention: str = "it was not recorded; record with kvtape record --score-all"


def begin_alike(scripts: Iterable[Script]) -> int:
    """How many sessions begin with the `DEFAULT_BLOCK` tokens of an earlier one: what a shared cache would know."""
    seen, alike = set[tuple[int, ...]](), 0
    for script in scripts:
        tokens = (t for stretch in _first_prompt(script) for t in stretch.tokens)
        begins = tuple(islice(tokens, DEFAULT_BLOCK))
        alike += begins in seen
        if len(begins) == DEFAULT_BLOCK:
            seen.add(begins)
    return alike


def _first_prompt(script: Script) -> tuple[Stretch, ...]:
    steps = (step for turn in script.turns for step in turn.steps if step.kind == "prefix")
    first = next(steps, None)
    return () if first is None else first.stretches
