"""Native cache eviction beside kvtape's policies: the same weights, prompts, tokens, and equally many rows.

For each prompt the comparator computes it, generates, and evicts as it does. Its tokens are then forced through
sessions of our own: dense, and one for each policy, which evicts at the very token where the comparator first did. What
is compared is how likely each of them found these tokens, from the first that the comparator chose with rows missing.

The comparator cannot be given tokens. A given text can be forced on it through a grammar, and how it is cut into tokens
stays its choice; or it speaks for itself, and then the tokens are those that it found likeliest, which flatters it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from kvtape.backends.batching.config import BLOCK, BatchingConfig, Eviction
from kvtape.backends.batching.files import read_batching_shape
from kvtape.backends.batching.isolated import IsolatedPipeline, OpenPipeline
from kvtape.backends.batching.occupancy import first_evicted
from kvtape.backends.batching.pipeline import Generation
from kvtape.backends.errors import ContextOverflow, UnsupportedOperation, UsageError
from kvtape.eval.batching.lanes import Evicts, run_lanes
from kvtape.eval.batching.policies import DENSE
from kvtape.eval.batching.tracks import BatchingTask, Lane, Prompt, Versus
from kvtape.eval.candidates import Candidate
from kvtape.eval.targets import Target, World, check_target
from kvtape.planner.rows import TrialRow

__all__ = ["check_versus", "run_versus"]

Progress = Callable[[int, int, str], None]


def check_versus(
    task: BatchingTask, model: Path, evictions: Sequence[Eviction], target: Target, candidates: Sequence[Candidate]
) -> None:
    """Raises UsageError for what cannot be run, or would evict nothing, before anything is computed."""
    shape = read_batching_shape(model)
    if shape.n_ctx_train and task.longest + 1 > shape.n_ctx_train:
        raise ContextOverflow(task.longest + 1, shape.n_ctx_train, "the model was not trained on so many")
    shortest = min(len(p.tokens) for p in task.prompts)
    for eviction in evictions:
        if shortest <= eviction.peak:
            raise UsageError(
                f"{eviction.label} keeps up to {eviction.peak} rows of a prompt of {shortest} tokens, so there is "
                "nothing to compare; lower its budget or raise --tokens"
            )
    check_target(target, [c.policy for c in candidates], task.longest)


def run_versus(
    task: BatchingTask,
    model: Path,
    eviction: Eviction,
    target: Target,
    candidates: Sequence[Candidate],
    world: World,
    number: int = 0,
    progress: Progress = lambda done, total, what: None,
    opened: OpenPipeline = IsolatedPipeline,
) -> list[Versus]:
    """One for each prompt; `number` tells comparators of one run apart. Raises what the engines raise."""
    blocks = -(-(task.longest + 1) // BLOCK) + 1
    config = BatchingConfig(blocks, task.chunk, task.threads, eviction=eviction)
    made = _native(task, model, config, opened)
    dense = _native_dense(task, model, BatchingConfig(blocks, task.chunk, task.threads), opened, made)
    found = []
    for i, (prompt, generation, said) in enumerate(zip(task.prompts, made, dense, strict=True)):
        progress(i, len(task.prompts), eviction.label)
        found.append(_beside(prompt, generation, said, eviction, target, candidates, world, f"{number}-{i}"))
    progress(len(task.prompts), len(task.prompts), eviction.label)
    return found


def _native(task: BatchingTask, model: Path, config: BatchingConfig, opened: OpenPipeline) -> list[Generation]:
    with opened(model, config) as pipeline:
        return [
            pipeline.generate(p.tokens, task.n_new, text=p.text if task.continued == "text" else None)
            for p in task.prompts
        ]


def _native_dense(
    task: BatchingTask, model: Path, config: BatchingConfig, opened: OpenPipeline, made: Sequence[Generation]
) -> list[tuple[float, ...]]:
    """Nll of the very tokens that were made, as part of a prompt that the same pipeline computes without evicting."""
    found = []
    with opened(model, config) as pipeline:
        for prompt, generation in zip(task.prompts, made, strict=True):
            said = pipeline.generate((*prompt.tokens, *generation.tokens), 1, echo=True).prompt_log_probs
            found.append(tuple(-p for p in said[len(prompt.tokens) - 1 :]))
    return found


def _beside(
    prompt: Prompt,
    made: Generation,
    native_dense: tuple[float, ...],
    eviction: Eviction,
    target: Target,
    candidates: Sequence[Candidate],
    world: World,
    name: str,
) -> Versus:
    since = first_evicted(made.decoding)
    if since is None:
        raise UnsupportedOperation(f"comparing with {eviction.label}", f"it evicted nothing of {prompt.label}")
    session_id = f"{target.engine.name}-batching-{name}"
    evicts = Evicts(since, eviction.peak)
    dense, lanes = run_lanes(prompt.tokens, made.tokens, evicts, target, candidates, world, session_id)
    versus = Versus(
        prompt=prompt,
        tokens=made.tokens,
        steps=made.steps,
        since=since,
        native=Lane(tuple(-p for p in made.log_probs), tuple(s.rows for s in made.decoding)),
        native_dense=native_dense,
        dense=dense,
        policies=tuple(zip(candidates, lanes, strict=True)),
    )
    world.sink.add_trials(_trials(versus, eviction, world, session_id))
    return versus


def _trials(versus: Versus, eviction: Eviction, world: World, session_id: str) -> list[TrialRow]:
    """The comparator's first; figures as in the report."""
    ways: list[tuple[str, int | None, Lane]] = [
        (eviction.label, eviction.most, versus.native),
        (DENSE.policy.canonical, None, versus.dense),
        *((candidate.policy.canonical, candidate.budget, lane) for candidate, lane in versus.policies),
    ]
    n_prompt = len(versus.prompt.tokens)
    return [
        TrialRow(
            run_id=world.run_id,
            trial=world.number(),
            session_id=session_id,
            task="batching",
            policy=policy,
            budget_tokens=budget,
            start=n_prompt + versus.since,
            stop=n_prompt + len(versus.tokens),
            nll=float(np.mean(lane.nll[versus.since :])),
            n_tokens=len(versus.tokens) - versus.since,
        )
        for policy, budget, lane in ways
    ]
