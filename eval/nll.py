"""The likelihood task: what a long text costs a model that streams it through a small context.

The text is teacher-forced, one token at a time, through one session for each policy; before each token the session's
distribution says how likely it was. Dense attention over the whole text runs beside them where it fits the model's
trained context, and each policy's distribution is compared with it at every token. All sessions go on in lockstep, so
that no more than `PIECE` dense distributions are held at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import UsageError
from kvtape.backends.logits import log_softmax
from kvtape.backends.protocol import Logits
from kvtape.backends.session import Session
from kvtape.eval.candidates import Candidate
from kvtape.eval.peaks import PeakSink
from kvtape.eval.targets import Target, World, check_target
from kvtape.planner.rows import TrialRow

__all__ = [
    "PIECE",
    "NllTask",
    "NllTrack",
    "check_task",
    "force",
    "forced",
    "kl_divergence",
    "run_nll",
    "stretches",
]

PIECE = 32
"""Tokens that each session goes on by in its turn: as many as one decode event holds."""

LogProbs = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class NllTask:
    """`tokens` of the text, at least 2; `n_ctx` that the policies stream through; `seed` of a generated text."""

    tokens: tuple[int, ...]
    n_ctx: int
    stretch: int = 1000
    seed: int | None = None


@dataclass(slots=True)
class NllTrack:
    """What one policy did to one text. `nll[i]` and `kl[i]`, nats, of token i + 1; `kl` empty without dense.

    `resident_most`: the most tokens that were resident after any event; `n_ctx`: the effective context. `absent`: why
    the policy did not run; it then has no figures.
    """

    backend: str
    candidate: Candidate
    n_ctx: int = 0
    resident_most: int = 0
    absent: str | None = None
    scored: bool | None = None
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _Lane:
    """A session that goes through the text, and its account."""

    session: Session
    session_id: str
    track: NllTrack


def kl_divergence(dense: LogProbs, other: LogProbs) -> float:
    """KL(dense || other) of two log-probability vectors, nats; never below 0. Not a number where one in them is not."""
    return float(np.maximum(0.0, np.dot(np.exp(dense), dense - other)))


def stretches(n_tokens: int, size: int) -> Iterator[tuple[int, int]]:
    """[start, stop) of each `size` tokens of a text, but for one of its first token alone, which nothing predicts."""
    for start in range(0, n_tokens, size):
        stop = min(start + size, n_tokens)
        if stop > max(1, start):
            yield start, stop


def check_task(task: NllTask, target: Target, candidates: Sequence[Candidate]) -> None:
    """Raises UsageError for a text that is none, a budget without room or a target that cannot evict, SpecError for a
    policy that needs more context."""
    if len(task.tokens) < 2:
        raise UsageError(f"the text has {len(task.tokens)} tokens; at least 2 are needed, one to predict")
    for candidate in candidates:
        if candidate.budget is not None and candidate.budget >= task.n_ctx:
            raise UsageError(
                f"policy {candidate.label}: a budget of {candidate.budget} leaves no room for a new token in a context "
                f"of {task.n_ctx}; lower the budget or raise --n-ctx"
            )
    check_target(target, [c.policy for c in candidates], task.n_ctx)


def run_nll(
    task: NllTask,
    target: Target,
    number: int,
    candidates: Sequence[Candidate],
    world: World,
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list[NllTrack]:
    """One track for each candidate, the dense one (policy `none`) first; `number` tells targets of one engine apart."""
    peaks = PeakSink(world.sink)
    tracks = [NllTrack(target.spec, c) for c in candidates]
    with ExitStack() as stack:
        lanes = []
        for i, track in enumerate(tracks):
            n_ctx = task.n_ctx if track.candidate.policy.evicts else len(task.tokens)
            trained = target.engine.facts.n_ctx_train
            if not track.candidate.policy.evicts and n_ctx > trained:
                track.absent = f"{n_ctx} tokens do not fit the trained context of {trained}"
                continue
            session_id = f"{target.engine.name}-{number}-text-{i}"
            session = stack.enter_context(world.session(target, track.candidate.policy, session_id, n_ctx, peaks))
            account = session.explain()
            track.n_ctx = account.n_ctx
            request = track.candidate.policy.score_request
            if request is not None:
                # Nobody asks a question here, so a policy that ranks by a probe has nothing to rank by.
                track.scored = bool(account.capabilities["attention_scores"]) and request.kind != "probe"
            session.ensure_prefix(task.tokens[:1])
            lanes.append(_Lane(session, session_id, track))
        for at in range(1, len(task.tokens), PIECE):
            _advance(lanes, task.tokens[at : at + PIECE])
            progress(min(at + PIECE, len(task.tokens)), len(task.tokens), target.spec)
    for lane in lanes:
        lane.track.resident_most = peaks.most[lane.session_id]
        world.sink.add_trials(_rows(lane, task, world))
    return tracks


def force(session: Session, piece: Sequence[int], see: Callable[[Logits], object] = lambda logits: None) -> None:
    """Put `piece` on the tape, whatever the model would have said; `see` is shown the logits before each of its tokens.

    Raises UsageError when the context is full before its end.
    """
    left = iter(piece)

    def choose(logits: Logits) -> int:
        see(logits)
        return next(left)

    result = session.decode(len(piece), choose=choose, stop_tokens=frozenset())
    if len(result.tokens) != len(piece):
        raise UsageError(
            f"the text stopped after {len(session.tape)} tokens: {result.stopped}"
            "; give a larger --n-ctx or a policy that evicts"
        )


def forced(session: Session, piece: Sequence[int]) -> list[LogProbs]:
    """Force `piece`; the distribution before each of its tokens. Raises as `force`."""
    said: list[LogProbs] = []
    force(session, piece, lambda logits: said.append(log_softmax(logits)))
    return said


def _advance(lanes: Sequence[_Lane], piece: Sequence[int]) -> None:
    """Every session by the same tokens, the dense one first: the others are compared with what it said."""
    dense: list[LogProbs] = []
    for lane in lanes:
        policy = lane.track.candidate.policy
        said = forced(lane.session, piece)
        if not policy.evicts:
            dense = said
        elif dense:
            lane.track.kl += [kl_divergence(d, o) for d, o in zip(dense, said, strict=True)]
        lane.track.nll += [-float(row[token]) for row, token in zip(said, piece, strict=True)]


def _rows(lane: _Lane, task: NllTask, world: World) -> list[TrialRow]:
    track = lane.track
    rows = []
    for start, stop in stretches(len(task.tokens), task.stretch):
        part = slice(max(0, start - 1), stop - 1)
        nll, kl = track.nll[part], track.kl[part]
        rows.append(
            TrialRow(
                run_id=world.run_id,
                trial=world.number(),
                session_id=lane.session_id,
                task="nll",
                policy=track.candidate.policy.canonical,
                budget_tokens=track.candidate.budget,
                seed=task.seed,
                start=max(1, start),
                stop=stop,
                nll=float(np.mean(nll)),
                kl=float(np.mean(kl)) if kl else None,
                n_tokens=len(nll),
            )
        )
    return rows
