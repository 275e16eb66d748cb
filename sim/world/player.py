"""One conversation's calls, carried out on a Session over the modelled backend: the same Session as live."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.errors import SessionFatal, UnknownBlock, UsageError
from kvtape.backends.modelled.backend import ModelledBackend
from kvtape.backends.modelled.shape import Shape
from kvtape.backends.modelled.work import CostModel
from kvtape.backends.protocol import EventSink, Logits
from kvtape.backends.session import Session
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.events import Placement
from kvtape.planner.specs import PolicySpec, parse_policy
from kvtape.sim.errors import SimulationError
from kvtape.sim.quality.attention import AttentionMap
from kvtape.sim.quality.meter import TurnMass
from kvtape.sim.quality.recorded import RecordedAttention
from kvtape.sim.world.script import Step, Stretch
from kvtape.sim.world.timeline import SlotTimeline

__all__ = ["Done", "Player", "Setup"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What every session of a conversation is opened with. `repeat`: carry out `asked` steps too.

    `attention` of the recorded tape, None where it was not recorded. `defer_prefill`: prompts wait for a decode.
    """

    shape: Shape
    policy: PolicySpec
    costs: CostModel
    run_id: str
    evict_by: str
    repeat: bool
    attention: AttentionMap | None = None
    defer_prefill: bool = False


@dataclass(slots=True)
class Done:
    """What came of a turn. `prompted_ns`: when the prompt was computed, or put off where no decode followed; None when
    it was refused.

    `decode_ns`: all time in which tokens were generated, evictions between them included. `mass`: what its queries
    found resident of what they attended to; None where that was not recorded.
    """

    prompted_ns: int | None = None
    generated: int = 0
    wanted: int = 0
    decode_ns: int = 0
    why: str | None = None
    not_repeated: int = 0
    slot_failed: bool = False
    mass: TurnMass | None = None


class Player:
    """A conversation. It has a session while it holds a slot; a new one begins with an empty cache."""

    def __init__(self, setup: Setup, name: str, sink: EventSink, timeline: SlotTimeline) -> None:
        self._setup, self._name, self._sink, self._time = setup, name, sink, timeline
        self._session: Session | None = None
        self._attention: RecordedAttention | None = None
        self._opened = 0
        self._snapshots: dict[int, tuple[int, tuple[int, ...]]] = {}

    def close(self, reason: str = "asked") -> None:
        """Idempotent."""
        session, self._session = self._session, None
        self._snapshots = {}
        if session is not None:
            session.close(reason)

    def lose(self, cause: str) -> None:
        """The slot failed while nothing ran on it: the session ends as one whose device was lost."""
        if self._session is not None:
            self._session.lose(cause)
        self.close()

    def turn(self, steps: Sequence[Step], tape: Sequence[Stretch], done: Done) -> None:
        """Carry the turn out into `done`, which holds also when something is refused."""
        session = self._open()
        if self._attention is not None:
            self._attention.begin_turn()
        try:
            self._steps(session, steps, tape, done)
        finally:
            if self._attention is not None:
                done.mass = self._attention.account()

    def _steps(self, session: Session, steps: Sequence[Step], tape: Sequence[Stretch], done: Done) -> None:
        so_far = tuple(t for s in tape for t in s.tokens)
        for step in steps:
            if self._attention is not None:
                self._attention.begin_step(step.until)
            if step.asked and not self._setup.repeat:
                done.not_repeated += 1
                continue
            try:
                self._step(session, step, tape, so_far, done)
            except SimulationError:
                raise  # no answer of a session: the simulation itself cannot go on
            except SessionFatal:
                if not self._time.failed:
                    raise
                done.slot_failed = True
                return
            except UsageError as err:
                if step.asked:
                    done.not_repeated += 1
                    continue
                done.why = f"{step.kind}: {err}"
                return

    def _open(self) -> Session:
        if self._session is None:
            setup = self._setup
            self._opened += 1
            if setup.attention is not None:
                self._attention = RecordedAttention(setup.attention, setup.policy.limit(setup.shape.n_ctx))
            backend = ModelledBackend(setup.shape, setup.costs, self._time, self._attention)
            self._session = Session(
                backend,
                setup.policy,
                self._sink,
                self._time,
                run_id=setup.run_id,
                session_id=self._name if self._opened == 1 else f"{self._name}~{self._opened}",
                evict_by=setup.evict_by,
                defer_prefill=setup.defer_prefill,
            )
        return self._session

    def _step(self, session: Session, step: Step, tape: Sequence[Stretch], so_far: tuple[int, ...], done: Done) -> None:
        if step.kind == "prefix":
            session.ensure_prefix(_segments(step.stretches), need_logits=step.logits)
            done.prompted_ns = self._time.now_ns()
        elif step.kind == "suffix":
            self._suffix(session, step, tape, so_far)
            done.prompted_ns = self._time.now_ns()
        elif step.kind == "compute":
            _ = session.logits
            done.prompted_ns = self._time.now_ns()
        elif step.kind == "generate":
            self._generate(session, step, done)
        elif step.kind == "snapshot":
            self._snapshots[step.n] = session.snapshot(), session.tape
            if self._attention is not None:
                self._attention.save(step.n)
        elif step.kind == "restore":
            self._restore(session, step)
        else:
            self._asked(session, step)

    def _suffix(self, session: Session, step: Step, tape: Sequence[Stretch], so_far: tuple[int, ...]) -> None:
        """Behind the tape; where this session's tape is another one, the whole of it is the prompt."""
        if len(session.tape) == step.at:
            for s in step.stretches:
                session.prefill_suffix(s.tokens, kind=s.kind)
            return
        if len(so_far) != step.at:
            raise UsageError(f"the tape has {len(session.tape)} tokens, the suffix was behind {step.at}")
        session.ensure_prefix(_segments((*tape, *step.stretches)))

    def _generate(self, session: Session, step: Step, done: Done) -> None:
        forced = iter(step.tokens)
        began, waits = self._time.now_ns(), session.pending_tokens > 0

        def choose(logits: Logits) -> int | None:
            nonlocal began, waits
            if waits:  # the first to be asked for: what waited is computed by now
                began, waits = self._time.now_ns(), False
                done.prompted_ns = began
            return next(forced, None)

        done.wanted += len(step.tokens)
        result = session.decode(step.n, choose=choose, stop_tokens=frozenset())
        done.generated += len(result.tokens)
        done.decode_ns += self._time.now_ns() - began

    def _restore(self, session: Session, step: Step) -> None:
        if step.n not in self._snapshots:
            raise UnknownBlock(f"snapshot {step.n} went with the cache that held it")
        session.restore(self._snapshots[step.n][0])
        if self._attention is not None:
            self._attention.put_back(step.n)

    def _asked(self, session: Session, step: Step) -> None:
        if step.kind == "evict":
            session.evict(step.at, step.at + step.n)
        elif step.kind == "admit":
            session.admit(step.n, Placement.IN_PLACE if step.in_place else Placement.APPEND)
        elif step.kind == "compact":
            session.compact()
        elif step.kind == "plan":
            session.plan_now(step.n or None)
        elif step.kind == "policy":
            session.set_policy(parse_policy(step.text))


def _segments(stretches: Sequence[Stretch]) -> list[PromptSegment]:
    return [PromptSegment(kind=s.kind, tokens=s.tokens, cache_class=s.cache_class) for s in stretches]
