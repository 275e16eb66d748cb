"""Given tokens, forced one by one through a session of our own that evicts where it is told to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.batching.config import BLOCK
from kvtape.backends.session import Session
from kvtape.eval.batching.policies import DENSE
from kvtape.eval.batching.tracks import Lane
from kvtape.eval.candidates import Candidate
from kvtape.eval.nll import forced
from kvtape.eval.targets import Target, World
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.outcome import Diagnostic
from kvtape.planner.specs import PolicySpec

__all__ = ["Evicts", "run_lanes"]

_KIND = "assistant"


@dataclass(frozen=True, slots=True)
class Evicts:
    """A policy evicts from the token before `since` on, whenever `peak` rows are there, or its own
    fewer, and one more is to come."""

    since: int
    peak: int


def run_lanes(
    prompt: Sequence[int],
    tokens: Sequence[int],
    evicts: Evicts,
    target: Target,
    candidates: Sequence[Candidate],
    world: World,
    session_id: str,
) -> tuple[Lane, list[Lane]]:
    """The dense lane and one for each candidate, all from the same computed prompt."""
    n_ctx = len(prompt) + len(tokens)
    # Generated tokens go on in the blocks of a prompt of their own kind, so that blocks are those of the whole tape.
    aligned = (len(prompt) - 1) // BLOCK * BLOCK
    before, rest = prompt[:aligned], prompt[aligned:]
    with world.session(target, DENSE.policy, session_id, n_ctx) as session:
        session.ensure_prefix([PromptSegment(kind=_KIND, tokens=tuple(before))], need_logits=False)
        saved = session.snapshot()
        dense = _forced(session, rest, tokens)
        lanes = []
        for candidate in candidates:
            session.restore(saved)
            lanes.append(_forced(session, rest, tokens, candidate.policy, evicts))
            session.set_policy(DENSE.policy)
    return dense, lanes


def _forced(
    session: Session,
    rest: Sequence[int],
    tokens: Sequence[int],
    policy: PolicySpec | None = None,
    evicts: Evicts = Evicts(0, 0),
) -> Lane:
    """`rest` of the prompt, then `tokens`: dense up to the one before `evicts.since`, under `policy` from there on."""
    nll: list[float] = []
    rows: list[int] = []
    session.prefill_suffix(rest, kind=_KIND)
    # The distribution of a token was computed over what is resident before anything is evicted for the token itself.
    for i, token in enumerate(tokens):
        rows.append(session.resident.n_tokens)
        if policy is not None and i == evicts.since - 1:
            session.set_policy(policy)
        if policy is not None and i >= evicts.since - 1:
            session.plan_now(policy.limit(evicts.peak))
        (said,) = forced(session, [token])
        nll.append(-float(said[token]))
    return Lane(tuple(nll), tuple(rows), _scored(session, policy))


def _scored(session: Session, policy: PolicySpec | None) -> bool | None:
    """Whether the last plan of a policy that ranks by scores had them."""
    plan = session.explain().last_plan
    if policy is None or policy.score_request is None or plan is None:
        return None
    return Diagnostic.SCORES_MISSING not in plan["diagnostics"]
