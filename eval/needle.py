"""The needle task: does the model still find a fact in what a policy kept?

The order is strict, and the log shows it. Once for each prompt: prefill the context, snapshot. Then for each policy:
restore; score (the question as a probe that leaves nothing, where the policy asks for one); plan and evict down to the
budget; and only then compute the question over what is left, and let the model answer. A budget counts what is kept of
the context; question and answer come on top of it, and nothing is evicted for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvtape.backends.errors import UsageError
from kvtape.backends.session import Session
from kvtape.eval.candidates import Candidate
from kvtape.eval.needles import is_correct
from kvtape.eval.places import Regions
from kvtape.eval.prompts import NeedlePrompt, needle_prompt
from kvtape.eval.targets import Target, World, check_target
from kvtape.planner.outcome import Diagnostic
from kvtape.planner.rows import TrialRow
from kvtape.planner.specs import PolicySpec, parse_policy

__all__ = ["NeedleTask", "NeedleTrial", "Progress", "prepare", "prompts_of", "run_needle", "run_prompt"]

Progress = Callable[[int, int, str], None]
"""Called with trials done, trials in all, and what runs."""


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """`seeds` one prompt each and region; `n_tokens` of the context at most. `n_ctx` None: as much as is needed."""

    format_name: str
    seeds: tuple[int, ...]
    where: tuple[str, ...]
    regions: Regions
    n_tokens: int
    n_ctx: int | None = None


@dataclass(frozen=True, slots=True)
class NeedleTrial:
    """One answer. `kept`: tokens of the context that were resident when the question came; `whole_needle`: whether
    all of the fact was. `scored`: whether the plan had scores; None where the policy asks for none."""

    backend: str
    candidate: Candidate
    region: str
    seed: int
    correct: bool
    said: str
    kept: int
    whole_needle: bool
    scored: bool | None
    elapsed_ns: int


def prompts_of(task: NeedleTask, target: Target) -> list[NeedlePrompt]:
    """Every prompt of the task in the target's tokens, all of them before anything is computed.

    Raises UsageError when one does not fit the context or the model.
    """
    trained = target.engine.facts.n_ctx_train
    limits = (("the model was trained on", trained), ("--n-ctx is", task.n_ctx))
    for what, limit in limits:
        if limit is not None and task.n_tokens > limit:
            raise UsageError(f"a context of {task.n_tokens} tokens is asked, {what} {limit}; lower --tokens")
    prompts = [
        needle_prompt(
            target.engine.tokenize,
            format_name=task.format_name,
            seed=seed,
            region=region,
            regions=task.regions,
            n_tokens=task.n_tokens,
        )
        for region in task.where
        for seed in task.seeds
    ]
    needed = _context_for(prompts)
    for what, limit in limits:
        if limit is not None and needed > limit:
            raise UsageError(f"prompt, question and answer need {needed} tokens, {what} {limit}; lower --tokens")
    return prompts


def prepare(task: NeedleTask, targets: Sequence[Target], candidates: Sequence[Candidate]) -> list[list[NeedlePrompt]]:
    """The prompts of each target. Raises UsageError or SpecError for a task that cannot be run."""
    for candidate in candidates:
        if candidate.budget is not None and candidate.budget >= task.n_tokens:
            raise UsageError(
                f"policy {candidate.label}: a budget of {candidate.budget} evicts nothing of a context of at most "
                f"{task.n_tokens} tokens; lower the budget or raise --tokens"
            )
    prompts = [prompts_of(task, target) for target in targets]
    for target, of_target in zip(targets, prompts, strict=True):
        check_target(target, [c.policy for c in candidates], task.n_ctx or _context_for(of_target))
    return prompts


def run_needle(
    task: NeedleTask,
    targets: Sequence[Target],
    prompts: Sequence[Sequence[NeedlePrompt]],
    candidates: Sequence[Candidate],
    world: World,
    progress: Progress = lambda done, total, what: None,
) -> list[NeedleTrial]:
    """Every candidate on every prompt of every target; `prompts` from `prepare`."""
    total = sum(map(len, prompts)) * len(candidates)
    done: list[NeedleTrial] = []
    for number, (target, of_target) in enumerate(zip(targets, prompts, strict=True)):
        n_ctx = task.n_ctx or _context_for(of_target)
        for prompt in of_target:
            session_id = f"{target.engine.name}-{number}-{prompt.region}-{prompt.seed}"
            for trial in run_prompt(prompt, target, candidates, world, session_id, n_ctx):
                done.append(trial)
                progress(len(done), total, f"{target.spec} seed {prompt.seed}")
    return done


def run_prompt(
    prompt: NeedlePrompt, target: Target, candidates: Sequence[Candidate], world: World, session_id: str, n_ctx: int
) -> Iterator[NeedleTrial]:
    """One session: the context computed once, then each candidate from the same state."""
    dense = _dense(candidates[0].policy)
    with world.session(target, dense, session_id, n_ctx) as session:
        session.ensure_prefix(prompt.context, need_logits=False)
        saved = session.snapshot()
        for candidate in candidates:
            session.restore(saved)
            yield _trial(session, prompt, candidate, target, world, session_id)
            session.set_policy(dense)


def _trial(
    session: Session, prompt: NeedlePrompt, candidate: Candidate, target: Target, world: World, session_id: str
) -> NeedleTrial:
    began = world.clock.now_ns()
    can_score = bool(session.explain().capabilities["attention_scores"])
    policy = candidate.policy_of(prompt.seed)
    _evict(session, prompt, policy, candidate.budget, can_score=can_score)
    resident = session.resident
    # What the policy decided is decided: question and answer are computed over it, and nothing more is evicted.
    session.set_policy(_dense(policy))
    session.prefill_suffix(prompt.question)
    answer = session.decode(prompt.answer_tokens).tokens
    said = target.engine.detokenize(answer)
    trial = NeedleTrial(
        backend=target.spec,
        candidate=candidate,
        region=prompt.region,
        seed=prompt.seed,
        correct=is_correct(prompt.needle, said),
        said=said,
        kept=resident.n_tokens,
        whole_needle=all(t in resident for t in range(prompt.start, prompt.stop)),
        scored=can_score and _had_scores(session, policy) if candidate.wants_scores else None,
        elapsed_ns=world.clock.now_ns() - began,
    )
    world.sink.add_trials([_row(trial, prompt, policy, world, session_id, len(answer))])
    return trial


def _evict(session: Session, prompt: NeedlePrompt, policy: PolicySpec, budget: int | None, *, can_score: bool) -> None:
    """Score, plan, evict. A policy that is asked for a probe without a score source goes without."""
    session.set_policy(policy)
    request = policy.score_request
    if request is not None and request.kind == "probe" and can_score:
        session.score(prompt.question)
    if budget is not None:
        session.plan_now(budget + 1)


def _had_scores(session: Session, policy: PolicySpec) -> bool:
    """False where the engine refused to measure, for whatever reason, and the policy was without."""
    plan = session.explain().last_plan
    return plan is None or plan["policy"] != policy.canonical or Diagnostic.SCORES_MISSING not in plan["diagnostics"]


def _dense(policy: PolicySpec) -> PolicySpec:
    """Keeps everything, in the same blocks."""
    return parse_policy(f"none:block={policy.block}")


def _row(
    trial: NeedleTrial, prompt: NeedlePrompt, policy: PolicySpec, world: World, session_id: str, n_generated: int
) -> TrialRow:
    return TrialRow(
        run_id=world.run_id,
        trial=world.number(),
        session_id=session_id,
        task="needle",
        policy=policy.canonical,
        budget_tokens=trial.candidate.budget,
        seed=trial.seed,
        region=trial.region,
        start=prompt.start,
        stop=prompt.stop,
        expected=prompt.needle.answer,
        answer=trial.said,
        correct=trial.correct,
        n_tokens=n_generated,
    )


def _context_for(prompts: Sequence[NeedlePrompt]) -> int:
    return max(len(p.context) + len(p.question) + p.answer_tokens for p in prompts)
