"""What a comparison is about and what it found, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvtape.backends.batching.occupancy import Step
from kvtape.eval.candidates import Candidate

__all__ = ["BatchingTask", "Continued", "Lane", "Prompt", "Versus"]

Continued = Literal["text", "greedy"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """`tokens` to compute, and the `text` behind them; `label` tells it apart."""

    label: str
    tokens: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class BatchingTask:
    """`n_new` tokens behind each prompt: its own `text`, or what the comparator says (`greedy`).

    `chunk` tokens of a prompt at a time, `threads` of the engines.
    """

    prompts: tuple[Prompt, ...]
    n_new: int
    chunk: int
    threads: int
    continued: Continued = "text"

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt and what follows it."""
        return max(len(p.tokens) for p in self.prompts) + self.n_new


@dataclass(frozen=True, slots=True)
class Lane:
    """One way of keeping rows, on one prompt's tokens: `nll[i]` of token i in nats, and the `rows[i]` of each layer
    that it was predicted from. `scored`: whether a policy that ranks by scores had them; None for others.
    """

    nll: tuple[float, ...]
    rows: tuple[int, ...]
    scored: bool | None = None


@dataclass(frozen=True, slots=True)
class Versus:
    """One prompt. `steps` of the comparator; `since` is the first token that it chose with rows missing.

    `native_dense`: nll of the same tokens as the comparator sees them when it keeps everything. `dense`: our own dense
    session's. `policies`: each of ours that evicts.
    """

    prompt: Prompt
    tokens: tuple[int, ...]
    steps: tuple[Step, ...]
    since: int
    native: Lane
    native_dense: tuple[float, ...]
    dense: Lane
    policies: tuple[tuple[Candidate, Lane], ...]

    @property
    def dense_difference(self) -> float:
        """The largest difference between both dense log-probabilities of a token, nats: how far two readers part."""
        return float(np.abs(np.array(self.native_dense) - np.array(self.dense.nll)).max())
