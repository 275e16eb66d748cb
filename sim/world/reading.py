"""From a log to scripts: what each recorded session asked for, with its tokens and its times."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kvtape.planner.blocks import DEFAULT_BLOCK
from kvtape.planner.deferral import waits
from kvtape.planner.events import Event, Op, Placement, Way
from kvtape.planner.opening import opening_of
from kvtape.planner.rows import BlockRow, PlanRow, RunRow, SessionRow, TokensRow
from kvtape.planner.specs import parse_policy
from kvtape.sim.errors import WorkloadError
from kvtape.sim.world.script import Script, Step, Turn
from kvtape.sim.world.surrogates import Surrogates
from kvtape.sim.world.tape import Tape

__all__ = ["RecordedSessions", "read_scripts"]


class RecordedSessions(Protocol):
    """What the simulator reads of a log; `traces.reader.Log` has it."""

    def default_run(self) -> RunRow: ...

    def sessions(self, run_id: str) -> Sequence[SessionRow]: ...

    def events(self, run_id: str, session_id: str) -> Sequence[Event]: ...

    def tokens(self, run_id: str, session_id: str) -> Mapping[int, TokensRow]: ...

    def blocks(self, run_id: str, session_id: str) -> Sequence[BlockRow]: ...

    def plans(self, run_id: str, session_id: str) -> Mapping[int, PlanRow]: ...


def read_scripts(log: RecordedSessions) -> tuple[Script, ...]:
    """The sessions of the log's default run, in the order in which they began.

    Raises WorkloadError for a run without a prompt, and for times that go back.
    """
    run = log.default_run().run_id
    surrogates, scripts = Surrogates(), []
    everything = [(row, list(log.events(run, row.session_id))) for row in log.sessions(run)]
    first_ns = min((events[0].at_ns for _, events in everything if events), default=0)
    for row, events in everything:
        reader = _Reader(row, log.tokens(run, row.session_id), log.plans(run, row.session_id), surrogates, first_ns)
        for block in log.blocks(run, row.session_id):
            reader.rows.setdefault(block.seq, []).append(block)
        scripts.append(reader.read(events))
    if not any(s.turns for s in scripts):
        raise WorkloadError(f"run {run} has no prompt; there is nothing to simulate")
    n_vocab = max([surrogates.count, *(s.n_vocab for s in scripts)])
    return tuple(replace(s, n_vocab=n_vocab) for s in scripts)


@dataclass(slots=True)
class _Call:
    """A call that is being read: its first event, where the tape ended, and which events brought its tokens.

    `waiting`: the calls right before it whose prompts wait, in order; what they offered comes with this one's tokens.
    `computed`: they were computed for another reason than a decode.
    """

    event: Event
    tape_start: int
    first: int | None = None
    brought: list[int] = field(default_factory=list)
    waiting: list[_Call] = field(default_factory=list)
    computed: bool = False


@dataclass(slots=True)
class _Open:
    """A turn that is being read."""

    number: int
    at_ns: int
    think_ns: int
    tape: Tape
    tape_stop: int
    steps: list[Step] = field(default_factory=list)


class _Reader:
    def __init__(
        self,
        row: SessionRow,
        tokens: Mapping[int, TokensRow],
        plans: Mapping[int, PlanRow],
        surrogates: Surrogates,
        first_ns: int,
    ) -> None:
        self.rows: dict[int, list[BlockRow]] = {}
        self._row, self._tokens, self._plans, self._surrogates = row, tokens, plans, surrogates
        self._first_ns = first_ns
        self._tape, self._saved = Tape(), dict[int, Tape]()
        self._turns: list[Turn] = []
        self._open: _Open | None = None
        self._call: _Call | None = None
        self._early: list[Step] = []
        self._policy = row.policy
        self._compacting = self._closes_next = False
        self._ended, self._skipped, self._end_ns, self._largest = "open", 0, first_ns, 0
        self._block = parse_policy(row.policy).block if row.policy else DEFAULT_BLOCK
        self._seq = 0

    def read(self, events: Sequence[Event]) -> Script:
        last_ns = 0
        computes = any(e.op in (Op.PREFILL, Op.DECODE) for e in events)
        recomputes = any(e.op == Op.EVICT and e.way == Way.RECOMPUTE for e in events)
        can_remove = json.loads(self._row.capabilities or "{}").get("remove_middle", False)
        for event, after in zip(events, [*events[1:], None], strict=True):
            if event.op in (Op.PROMPT, Op.GENERATE):  # what a call carries out may have begun before what it needs
                if event.at_ns < last_ns:
                    raise WorkloadError(
                        f"session {event.session_id} seq {event.seq}: time goes back from {last_ns} to {event.at_ns} ns"
                        "; kvtape verify LOG says whether it was changed"
                    )
                last_ns = event.at_ns
            self._seq = event.seq
            self._read(event, after, computes=computes)
            self._end_ns = max(self._end_ns, event.at_ns + (event.elapsed_ns or 0))
            if self._ended != "open":
                break
        self._seq += 1
        self._finish_call()
        self._finish_turn()
        evict_by = "recompute" if recomputes and can_remove else "native"
        defers = opening_of(events).defer_prefill
        return Script(self._row, tuple(self._turns), self._ended, self._skipped, evict_by, self._largest + 1, defers)

    def _read(self, event: Event, after: Event | None, *, computes: bool) -> None:
        if event.op in (Op.PROMPT, Op.GENERATE):
            self._begin(event)
            if not computes:
                self._imported(event)
        elif event.op in (Op.PREFILL, Op.DECODE):
            self._brings(event)
        elif event.op == Op.TRUNCATE:
            self._tape.cut(event.start or 0)
        elif event.op == Op.PLAN:
            self._plan(event)
        elif event.op in (Op.CLOSE, Op.FATAL, Op.LOST):
            self._ended = str(event.op)
        else:
            self._by_name(event, after)

    def _begin(self, event: Event) -> None:
        waiting = self._waiting(event)
        if not waiting:
            self._finish_call()
        self._compacting = self._closes_next = False
        if event.op == Op.PROMPT and not waiting:
            self._finish_turn()
            at = event.at_ns - self._first_ns
            think = max(0, event.at_ns - self._end_ns) if self._turns else 0
            self._open = _Open(len(self._turns) + 1, at, think, self._tape.copy(), len(self._tape.tokens), self._early)
            self._early = []
        self._call = _Call(event, len(self._tape.tokens), waiting=waiting)

    def _waiting(self, event: Event) -> list[_Call]:
        """The calls that a suffix joins: what they offered waits, and nothing of it has come."""
        call = self._call
        if event.reason != "suffix" or not waits(event) or call is None or call.brought or not waits(call.event):
            return []
        return [*call.waiting, call]

    def _brings(self, event: Event) -> None:
        start, n = event.start or 0, event.n_tokens or 0
        row = self._tokens.get(event.seq)
        ids = row.tokens if row is not None and row.tokens is not None else self._surrogates.of(row, start, n)
        self._largest = max(self._largest, max(ids, default=0))
        self._tape.put(start, ids)
        if self._call is not None:
            self._call.first = start if self._call.first is None else self._call.first
            self._call.brought.append(event.seq)
            self._call.computed = waits(self._call.event) and event.deferred_prefill_tokens is None

    def _imported(self, event: Event) -> None:
        """A source that tells of requests alone: the prompt is the tape, the answer goes behind it."""
        n = event.n_tokens or 0
        row = self._tokens.get(event.seq)
        start = (row.start if row is not None else 0) if event.op == Op.PROMPT else len(self._tape.tokens)
        if event.op == Op.PROMPT and event.reason == "suffix":
            start = event.start or 0
        ids = row.tokens if row is not None and row.tokens is not None else self._surrogates.of(row, start, n)
        self._largest = max(self._largest, max(ids, default=0))
        self._tape.cut(start)
        self._tape.put(start, ids)

    def _plan(self, event: Event) -> None:
        plan = self._plans.get(event.seq)
        if plan is not None and plan.policy != self._policy:
            self._policy = plan.policy
            self._add(Step("policy", text=plan.policy, asked=True))
        if event.reason == "asked":
            self._finish_call()
            self._add(Step("plan", plan.limit_tokens if plan is not None else 0, asked=True))

    def _by_name(self, event: Event, after: Event | None) -> None:
        """What a caller asks for by name: it ends what went on before."""
        step = self._named(event, after)
        if step is not None:
            self._finish_call()
            self._add(step)

    def _named(self, event: Event, after: Event | None) -> Step | None:
        reason = event.reason or ""
        if event.op != Op.SHIFT:
            self._compacting = False
            self._closes_next = event.op == Op.EVICT and event.way == Way.REBASED
        if event.op == Op.SNAPSHOT:
            self._finish_call()
            self._saved[event.snapshot_id or 0] = self._tape.copy()
            return Step("snapshot", event.snapshot_id or 0)
        if event.op == Op.RESTORE:
            self._finish_call()
            self._tape = self._saved.get(event.snapshot_id or 0, Tape()).copy()
            return Step("restore", event.snapshot_id or 0)
        if event.op == Op.EVICT and not reason.startswith("plan:"):
            return Step("evict", event.n_tokens or 0, event.start or 0, asked=True)
        if event.op == Op.ADMIT and reason != "hole":
            return Step("admit", event.block_id or 0, in_place=event.placement != Placement.APPEND, asked=True)
        if event.op == Op.SHIFT and reason == "asked":
            return self._shift(after)
        return None

    def _shift(self, after: Event | None) -> Step | None:
        """A shift that was asked for closes the place of an evict, opens one for an admit, or is a compaction."""
        closes, self._closes_next = self._closes_next, False
        opens = after is not None and after.op == Op.ADMIT
        goes_on, self._compacting = self._compacting, not closes and not opens
        return Step("compact", asked=True) if self._compacting and not goes_on else None

    def _finish_call(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        rows = [row for seq in call.brought for row in self.rows.get(seq, ())]
        calls = [*call.waiting, call]
        for one, after in zip(calls, [*calls[1:], None], strict=True):
            stop = None if after is None else after.event.start
            if call.first is not None:
                self._lay(one, max(call.first, _begins(one)), stop, rows)
            step = self._step(one)
            if step is None:
                self._skipped += 1
            else:
                self._add(step)
        if call.computed:  # by what comes next, which may leave no event of its own: a look at the logits, say
            self._add(Step("compute"))

    def _lay(self, call: _Call, start: int, stop: int | None, rows: Sequence[BlockRow]) -> None:
        """The segments of one call, which ends at `stop` where others joined it."""
        its = [row for row in rows if row.stop > start and (stop is None or row.start < stop)]
        self._tape.lay(start, its, self._block)

    def _step(self, call: _Call) -> Step | None:
        event, tape, n = call.event, self._tape, call.event.n_tokens or 0
        if event.op == Op.GENERATE:
            tokens = tuple(tape.tokens[call.tape_start :])
            asked = len(tokens) if event.n_tokens is None else n  # who captures an engine is not told a number
            return Step("generate", asked, call.tape_start, tokens) if tokens else None
        if event.reason == "suffix":
            start = event.start or 0
            whole = len(tape.tokens) >= start + n
            return Step("suffix", n, start, stretches=tape.stretches(start, start + n)) if whole else None
        if len(tape.tokens) < n:
            return None  # refused or taken back
        # A prompt of which all was kept did not want its logits.
        logits = event.start is None or event.start < n
        return Step("prefix", n, stretches=tape.stretches(0, n), logits=logits)

    def _add(self, step: Step) -> None:
        step = replace(step, until=self._seq)
        if self._open is None:
            self._early.append(step)
            return
        # The policy that a plan names ruled before the call began in which the plan was made: that call comes behind.
        self._open.steps.append(step)

    def _finish_turn(self) -> None:
        done, self._open = self._open, None
        if done is not None and done.steps:
            before = done.tape.stretches(0, done.tape_stop)
            self._turns.append(Turn(done.number, done.at_ns, done.think_ns, tuple(done.steps), before))


def _begins(call: _Call) -> int:
    """Where what a call brings begins at the earliest; only those that others joined say it."""
    return (call.event.start or 0) if waits(call.event) else 0
