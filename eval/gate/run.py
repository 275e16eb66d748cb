"""One cell of the gate, from its conversations to its verdict."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.protocol import Clock
from kvtape.backends.transcript import Transcript
from kvtape.eval.gate.arms import Arms, Meter
from kvtape.eval.gate.cells import Cell, CellArms
from kvtape.eval.gate.effect import LEAST_CONVERSATIONS
from kvtape.eval.gate.smoke import run_smoke
from kvtape.eval.gate.turns import Tokenize, run_turns
from kvtape.eval.gate.verdict import MARGIN, Outcome, judge
from kvtape.eval.gate.workloads import Workload
from kvtape.eval.targets import NullSink, Target, World

__all__ = ["Effort", "context_for", "refusal", "run_arms", "run_cell"]

_SMOKE_SEED = 1_000_003
"""Added to the seed: the smoke talks about other things than the timed turns."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: timed `turns` in each arm at least, rounded up to whole conversations."""

    turns: int = 32
    smoke_conversations: int = 2
    seed: int = 0
    margin: float = MARGIN

    def conversations(self, workload: Workload) -> int:
        return max(LEAST_CONVERSATIONS, -(-self.turns // workload.turns))


def run_cell(
    cell: Cell,
    target: Target,
    world: World,
    meter: Meter,
    effort: Effort,
    *,
    prefix: str = "",
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Outcome:
    """Measure and judge. Raises UsageError and UnsupportedOperation where the optimisation cannot be had here."""
    tokenize = target.engine.tokenize
    arms = CellArms(cell, target, world, context_for(cell.workload, effort, tokenize), prefix)
    return run_arms(cell.workload, arms, meter, tokenize, effort, settle=world.sink.flush, progress=progress)


def run_arms(
    workload: Workload,
    arms: Arms,
    meter: Meter,
    tokenize: Tokenize,
    effort: Effort,
    *,
    settle: Callable[[], object] = lambda: None,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> Outcome:
    """The quality smoke, which also warms everything up, then the timed turns, then the verdict."""
    smoke = run_smoke(workload, effort.smoke_conversations, arms, tokenize, seed=effort.seed + _SMOKE_SEED)
    conversations = effort.conversations(workload)
    turns = run_turns(
        workload, conversations, arms, meter, tokenize, seed=effort.seed, settle=settle, progress=progress
    )
    return judge(turns, smoke, threads=meter.threads, margin=effort.margin)


def refusal(cell: Cell, target: Target, effort: Effort, clock: Clock) -> str | None:
    """Why no optimised session of the cell opens on the engine, None where one does. Nothing is computed or recorded.

    Raises what a plain session raises too: UsageError, EnvironmentProblem.
    """
    n_ctx = context_for(cell.workload, effort, target.engine.tokenize)
    try:
        CellArms(cell, target, World(NullSink(), clock, "gate-look"), n_ctx).open("optimised", "look").close()
    except UnsupportedOperation as err:
        return str(err)
    return None


def context_for(workload: Workload, effort: Effort, tokenize: Tokenize) -> int:
    """Tokens that the longest conversation may come to."""
    smoke = [(n, effort.seed + _SMOKE_SEED) for n in range(effort.smoke_conversations)]
    timed = [(n, effort.seed) for n in range(effort.conversations(workload))]
    return max(_length(workload, number, seed, tokenize) for number, seed in (*smoke, *timed))


def _length(workload: Workload, number: int, seed: int, tokenize: Tokenize) -> int:
    said, script = workload.draw(number, seed), Transcript(tokenize)
    messages = [script.message("system", said.system), *(script.message("user", text) for text in said.messages)]
    answers = len(said.messages) * (len(script.cue.tokens or ()) + workload.answer + len(script.blank.tokens or ()))
    return sum(len(m.tokens or ()) for m in messages) + answers
