"""A proof row for every option: does it compute what it says?

Each setting runs twice: once with a given text forced on it, once speaking for itself. The very tokens of the first run
are then part of a dense prompt, so that each log-probability has a dense one beside it. A setting that leaves nothing
out must give dense's numbers; one that does leave something out may cost no more than `LIMIT_EXCESS`.

What is cached is run once more: the second and the third run reuse the same blocks, and must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from kvtape.backends.batching.config import BLOCK, BatchingConfig
from kvtape.backends.batching.isolated import IsolatedPipeline, OpenPipeline, Pipeline
from kvtape.backends.batching.occupancy import first_evicted
from kvtape.backends.batching.pipeline import Generation
from kvtape.backends.errors import EngineFault, EnvironmentProblem
from kvtape.eval.batching.cases import Case
from kvtape.eval.batching.tracks import Prompt

__all__ = ["LIMIT_DIFFERENCE", "LIMIT_EXCESS", "Proof", "Works", "prove", "verdicts"]

LIMIT_DIFFERENCE: Final = 1e-3
"""Nats: the most that a log-probability of a setting without loss may be from dense's. Sound ones are within 1e-4."""

LIMIT_EXCESS: Final = 0.25
"""Nats a token that a setting may cost over dense on the same tokens."""

Works = Literal["true", "false", "error"]


@dataclass(frozen=True, slots=True)
class Proof:
    """One setting. `n` log-probabilities were compared: of the forced tokens, and of the prompt's where the option
    works on prompts. `max_difference`, `excess`: nats. `ids_equal`: greedy tokens are dense's. `repeatable`: two
    runs gave the prompt the same bits. All None where it failed; `why` says how, or what limit was passed.
    """

    case: Case
    works: Works
    why: str | None
    n: int = 0
    max_difference: float | None = None
    excess: float | None = None
    ids_equal: bool | None = None
    repeatable: bool | None = None

    @property
    def limit(self) -> float:
        return LIMIT_DIFFERENCE if self.case.exact else LIMIT_EXCESS


class _Dense:
    """What the same pipeline says without the option, of any tokens."""

    def __init__(self, pipeline: Pipeline, prompt: Prompt, n_new: int) -> None:
        self._pipeline = pipeline
        self._prompt = prompt.tokens
        self._known: dict[tuple[int, ...], np.ndarray] = {}
        self.greedy = pipeline.generate(prompt.tokens, n_new)

    def of(self, tokens: tuple[int, ...]) -> np.ndarray:
        """Log-probabilities of the prompt from its second token on and of `tokens` behind it."""
        if tokens not in self._known:
            said = self._pipeline.generate((*self._prompt, *tokens), 1, echo=True)
            self._known[tokens] = np.array(said.prompt_log_probs)
        return self._known[tokens]


def prove(
    model: Path,
    prompt: Prompt,
    n_new: int,
    cases: Sequence[Case],
    threads: int = 1,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
    opened: OpenPipeline = IsolatedPipeline,
) -> list[Proof]:
    """One row for each case. Raises what a dense run raises; what an option does wrong is in its row."""
    blocks = -(-(len(prompt.tokens) + n_new + 1) // BLOCK) + 1
    rows = []
    with opened(model, BatchingConfig(blocks, threads=threads)) as plain:
        dense = _Dense(plain, prompt, n_new)
        for i, case in enumerate(cases):
            progress(i, len(cases), f"{case.option} {case.setting}")
            run = _again if case.again else _one
            try:
                with opened(model, case.config) as pipeline:
                    rows.append(run(pipeline, prompt, n_new, case, dense))
            except (EngineFault, EnvironmentProblem) as err:
                rows.append(Proof(case, "error", err.cause if isinstance(err, EngineFault) else str(err)))
    return _grounded(rows)


def _grounded(rows: Sequence[Proof]) -> list[Proof]:
    """A setting that leaves something out is no better than the same computation where it leaves nothing out."""
    wrong = {row.case.group for row in rows if row.case.exact and row.works != "true"}
    return [
        replace(row, works="false", why="computes wrong numbers also where it leaves nothing out")
        if row.works == "true" and row.case.group in wrong
        else row
        for row in rows
    ]


def verdicts(rows: Sequence[Proof]) -> dict[str, Works]:
    """Of each option: `true` only if every row of it is; `error` if no row that leaves something out ran."""
    found: dict[str, Works] = {}
    for option in dict.fromkeys(row.case.option for row in rows):
        own = [row for row in rows if row.case.option == option]
        at_work = [row.works for row in own if not row.case.exact] or [row.works for row in own]
        if all(row.works == "true" for row in own):
            found[option] = "true"
        else:
            found[option] = "error" if all(works == "error" for works in at_work) else "false"
    return found


def _one(pipeline: Pipeline, prompt: Prompt, n_new: int, case: Case, dense: _Dense) -> Proof:
    forced = pipeline.generate(prompt.tokens, n_new, text=prompt.text, echo=True)
    greedy = pipeline.generate(prompt.tokens, n_new, echo=True)
    own = np.array((*forced.prompt_log_probs, *forced.log_probs))
    difference = dense.of(forced.tokens) - own
    # An eviction begins after the prompt; what was computed before it can only dilute what it costs.
    since = first_evicted(forced.decoding) if case.config.eviction is not None else None
    cost = difference if since is None else difference[len(prompt.tokens) - 1 + since :]
    return _judged(
        case,
        n=len(cost),
        max_difference=float(np.abs(difference).max()),
        excess=float(cost.mean()),
        ids_equal=greedy.tokens == dense.greedy.tokens,
        repeatable=greedy.prompt_log_probs == forced.prompt_log_probs,
    )


def _again(pipeline: Pipeline, prompt: Prompt, n_new: int, case: Case, dense: _Dense) -> Proof:
    first, second, third = (pipeline.generate(prompt.tokens, n_new) for _ in range(3))
    if len(second.steps) >= len(first.steps):
        return Proof(case, "false", f"nothing was reused: {len(second.steps)} steps, as the first time")
    difference = np.array(dense.greedy.log_probs) - np.array(second.log_probs)
    same = second.tokens == dense.greedy.tokens
    return _judged(
        case,
        n=n_new,
        max_difference=float(np.abs(difference).max()),
        excess=float(difference.mean()),
        ids_equal=same,
        repeatable=_bits(second) == _bits(third),
    )


def _bits(made: Generation) -> tuple[tuple[int, ...], tuple[float, ...]]:
    return made.tokens, made.log_probs


def _judged(case: Case, *, n: int, max_difference: float, excess: float, ids_equal: bool, repeatable: bool) -> Proof:
    why = None
    if case.exact and max_difference > LIMIT_DIFFERENCE:
        why = f"leaves nothing out, and a log-probability is {max_difference:.3g} from dense's"
    elif case.exact and not ids_equal:
        why = "leaves nothing out, and says other tokens than dense"
    elif not repeatable:
        why = "the same prompt gave other numbers the second time"
    elif not case.exact and excess > LIMIT_EXCESS:
        why = f"costs {excess:.3g} nats a token"
    return Proof(case, "true" if why is None else "false", why, n, max_difference, excess, ids_equal, repeatable)
