"""One knob under test: opens sessions with it, and says what came of a measure that could not be taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from kvtape.backends.errors import EngineFault, EnvironmentProblem, SessionFatal, UsageError
from kvtape.backends.logits import log_softmax
from kvtape.backends.proofs.rows import Ability, Measure
from kvtape.backends.protocol import Backend, Clock, Engine, Logits, SessionConfig
from kvtape.backends.session import Session
from kvtape.eval.certification.smoke import Smoke
from kvtape.eval.nll import kl_divergence
from kvtape.eval.targets import NullSink, Target, World
from kvtape.planner.specs import parse_policy

__all__ = ["Bench", "attempt", "kl_of_logits", "logits_of"]


@dataclass(frozen=True, slots=True)
class Bench:
    """A loaded engine, and the configuration of its sessions but for the context."""

    engine: Engine
    config: SessionConfig
    smoke: Smoke
    clock: Clock

    def target(self) -> Target:
        """For the tasks of `eval`."""
        return Target(self.engine.name, self.engine, self.config)

    def world(self) -> World:
        """Without a log: what a certification proves are its numbers."""
        return World(NullSink(), self.clock, "certify")

    @contextmanager
    def opened(
        self,
        policy: str,
        n_ctx: int,
        *,
        cold_tokens: int = 0,
        options: Sequence[tuple[str, str]] = (),
        sink: NullSink | None = None,
    ) -> Iterator[tuple[Session, Backend]]:
        """A session and the backend under it. Raises UsageError and its kin, EnvironmentProblem, EngineFault."""
        asked = {**self.config.options, **dict(options)}
        config = replace(self.config, n_ctx=n_ctx, cold_budget_tokens=cold_tokens, options=asked)
        backend = self.engine.open(config)
        with self.world().session_on(backend, parse_policy(policy), "certify", sink) as session:
            yield session, backend


def attempt(ability: Ability, name: str, measure: Callable[[], Sequence[Measure]]) -> list[Measure]:
    """What `measure` finds. Where it was refused or the engine failed, one measure that says so."""
    try:
        return list(measure())
    except (UsageError, EnvironmentProblem) as err:
        return [Measure(ability=ability, name=name, verdict="refused", reason=_line(err))]
    except (EngineFault, SessionFatal) as err:
        return [Measure(ability=ability, name=name, verdict="fail", reason=_line(err))]


def logits_of(session: Session) -> Logits:
    """A copy of the logits behind the last token. Raises UsageError where nothing was computed."""
    if session.logits is None:
        raise UsageError("nothing was computed, so there are no logits to compare; give a longer text")
    return np.array(session.logits)


def kl_of_logits(one: Logits, other: Logits) -> float:
    """KL(one || other) in nats; exactly 0 of equal bits. Not a number where a logit is not."""
    if np.array_equal(one, other):
        return 0.0
    if not (np.isfinite(one).all() and np.isfinite(other).all()):
        return float("nan")
    return kl_divergence(log_softmax(one), log_softmax(other))


def _line(err: Exception) -> str:
    return " ".join(str(err).split())
