"""One engine through one case, timed: the logits before each token that is put behind the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvtape.backends.errors import Cancelled, KvtapeError
from kvtape.backends.protocol import Clock
from kvtape.backends.reference.engines.engine import KvEngine
from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import EngineChoice, parse_engine
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.weights import Weights
from kvtape.eval.engine_cases import EngineCase

__all__ = ["EngineRun", "run_case", "warm_up"]


@dataclass(slots=True)
class EngineRun:
    """`logits[i]` `[n_vocab]` stands before `tokens[i]`; the first is that of the prefill.

    Fewer than `asked` where `problem` came in between. Times in nanoseconds, the output matrix included; `step_ns` of
    `len(logits) - 1` decode steps. `harness` still holds the session.
    """

    harness: Harness
    asked: int
    logits: list[Floats] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    prefill_ns: int = 0
    step_ns: int = 0
    problem: KvtapeError | None = None


def run_case(
    choice: EngineChoice, weights: Weights, case: EngineCase, steps: int, clock: Clock, tokens: Sequence[int] | None
) -> EngineRun:
    """A prefill and `steps` decode steps on a new engine. `tokens` are what is put behind the prompt, at least
    `steps + 1`; None for the engine's own, each the first of the largest logits.

    An error of the engine ends the run and stands in it. Raises Cancelled, and what is no KvtapeError.
    """
    harness = Harness(choice, weights)
    run = EngineRun(harness, steps + 1)
    try:
        began = clock.now_ns()
        first = _begin(harness, case)
        run.prefill_ns = clock.now_ns() - began
        run.logits.append(first)
        run.tokens.append(_token(run, tokens))
        for _ in range(steps):
            began = clock.now_ns()
            logits = harness.step(run.tokens[-1])
            run.step_ns += clock.now_ns() - began
            run.logits.append(logits)
            run.tokens.append(_token(run, tokens))
    except Cancelled:
        raise
    except KvtapeError as err:
        run.problem = err
    return run


def warm_up(weights: Weights) -> None:
    """Plain weights are unpacked at their first use, which is no engine's own cost."""
    Harness(parse_engine("standard"), weights).begin([0])


def _begin(harness: Harness, case: EngineCase) -> Floats:
    if isinstance(harness.engine, KvEngine):
        return harness.begin(case.prompt)
    context, question = case.context_and_question
    return harness.begin(question, context)


def _token(run: EngineRun, tokens: Sequence[int] | None) -> int:
    return int(run.logits[-1].argmax()) if tokens is None else tokens[len(run.tokens)]
