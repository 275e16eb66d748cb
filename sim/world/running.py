"""A simulated run: every conversation of a log on one machine, in modelled time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import simpy

from kvtape.backends.modelled.work import Work, WorkKind
from kvtape.backends.protocol import EventSink
from kvtape.sim.costs.model import CostTable
from kvtape.sim.errors import CostsError, Stalled
from kvtape.sim.modelled_time import check_time
from kvtape.sim.quality.reuse import least_prefilled
from kvtape.sim.world.failures import failure_times
from kvtape.sim.world.measures import Counter, TurnResult, summary
from kvtape.sim.world.player import Done, Player, Setup
from kvtape.sim.world.sampling import Sample
from kvtape.sim.world.script import Script, Turn, begin_alike
from kvtape.sim.world.server import Server
from kvtape.sim.world.settings import Settings
from kvtape.sim.world.shapes import check_costs, model_session
from kvtape.sim.world.sink import ChargingSink
from kvtape.sim.world.timeline import Link, SimTimeline, SlotTimeline, slot_failed

__all__ = ["Simulated", "check_world", "simulate"]

Progress = Callable[[int, int], None]
Wait = Generator[simpy.Event, Any, None]

_STEPS_WITHOUT_TIME: Final = 1_000_000
"""Steps in which simulated time may stand still before the watchdog ends the run, beside `_STEPS_OF_A_TURN`."""

_STEPS_OF_A_TURN: Final = 16
"""So many more for each turn: all of them may arrive at once, and none of them cost anything."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """`figures` over all turns (see `measures.summary`), the turns in the order in which they ended."""

    figures: dict[str, Any]
    turns: tuple[TurnResult, ...]
    rules: dict[str, str]
    assumed: tuple[str, ...]


def check_world(
    scripts: Sequence[Script], settings: Settings, costs: CostTable, *, n_ctx_train: int | None = None
) -> None:
    """Raises what `simulate` would raise of these before its first step: to be asked before a log is begun."""
    for script in scripts:
        check_costs(costs, script.row)
        if script.turns:
            model_session(script, settings, costs, n_ctx_train)
            settings.paced(script.turns[-1].at_ns)
    failure_times(settings.slot_failures, _n_slots(settings, sum(bool(s.turns) for s in scripts)))


def _n_slots(settings: Settings, n_tenants: int) -> int:
    return n_tenants if settings.slots is None else settings.slots


def simulate(
    scripts: Sequence[Script],
    settings: Settings,
    costs: CostTable,
    *,
    run_id: str = "simulated",
    sinks: Sequence[EventSink] = (),
    sample: Sample | None = None,
    n_ctx_train: int | None = None,
    progress: Progress | None = None,
) -> Simulated:
    """Run `scripts` on the machine that `settings` and `costs` describe; events go to `sinks`, of a `sample` or of all.

    Raises SimulationError (costs of another model, nothing said of a context, ...), SpecError and UnsupportedOperation
    for a policy that the modelled engine cannot follow, Stalled when simulated time stands still. What does not fit
    or is refused in the middle is an outcome, and counted.
    """
    for script in scripts:
        check_costs(costs, script.row)
    asking = [script for script in scripts if script.turns]
    world = _World(settings, costs, run_id, sinks, progress, sum(len(s.turns) for s in asking), len(asking))
    names = [script.row.session_id for script in asking]
    told = frozenset(names) if sample is None else sample.of(names)
    tenants = [_Tenant(world, script, n_ctx_train, told) for script in asking]
    for tenant in tenants:
        world.env.process(world.kept(tenant.live()))
    world.run()
    for tenant in tenants:
        tenant.player.close()
    events = "all" if sample is None else sample.rule(len(told), len(names))
    rules: dict[str, str] = {"events": events} if sinks else {}
    return world.result(tenants, rules)


@dataclass
class _World:
    settings: Settings
    costs: CostTable
    run_id: str
    sinks: Sequence[EventSink]
    progress: Progress | None
    n_turns: int
    n_tenants: int
    turns: list[TurnResult] = field(default_factory=list)
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.env = simpy.Environment(initial_time=0)
        s = self.settings
        n_slots = _n_slots(s, self.n_tenants)
        self.server = Server(self.env, n_slots, self.n_tenants, s.memory_bytes, failure_times(s.slot_failures, n_slots))
        rate = s.link_bytes_per_s
        self.link = None if rate is None else Link(self.env, rate, s.link_latency_ns)
        self.counter = Counter()
        self.asking = _Asking(self.costs)

    def run(self) -> None:
        """Until nobody is left: a slot that would fail later moves no end."""
        last, still = self.env.now, 0
        patience = _STEPS_WITHOUT_TIME + _STEPS_OF_A_TURN * self.n_turns
        while self.n_tenants and self.env.peek() != float("inf"):
            self.env.step()
            if self.failure is not None:
                raise self.failure
            still = still + 1 if self.env.now == last else 0
            last = self.env.now
            check_time(int(last))
            if still > patience:
                raise Stalled(
                    f"simulated time stands still at {last} ns after {still} steps; {len(self.turns)} turns done"
                )

    def kept(self, process: Wait) -> Wait:
        """`process`, with what it raises kept: SimPy would make a new exception of it, from its arguments alone."""
        try:
            yield from process
            self.n_tenants -= 1
        except Exception as err:
            self.failure = self.asking.failure or err

    def done(self, result: TurnResult) -> None:
        self.turns.append(result)
        if self.progress is not None:
            self.progress(len(self.turns), self.n_turns)

    def result(self, tenants: Sequence[_Tenant], rules: dict[str, str]) -> Simulated:
        least = sum(least_prefilled(t.script) for t in tenants)
        paid = self.counter.prefilled + self.counter.recomputed
        extra = {
            "displaced": self.server.displaced,
            "slots_failed": self.server.dead,
            "lost_turns": sum(t.lost_turns for t in self.turns),
            "lost_caches": sum(t.lost_caches for t in tenants),
            "not_repeated": sum(t.not_repeated for t in tenants),
            "skipped": sum(t.script.skipped for t in tenants),
            "link_busy_ns": None if self.link is None else self.link.busy_ns,
            "link_bytes": None if self.link is None else self.link.n_bytes,
            "opt_prefilled_tokens": least,
            "prefill_regret_tokens": paid - least if all(t.outcome == "served" for t in self.turns) else None,
        }
        assumed = dict.fromkeys(text for t in tenants for text in t.modelled.assumed)
        assumed |= dict.fromkeys(self.costs.assumptions(self.asking.kinds))
        alike = begin_alike(t.script for t in tenants)
        if alike:
            there = f"of {len(tenants)} the beginnings of {alike} had been there before"
            assumed[f"sessions share nothing, though {there}; kvtape fleet shares prefixes"] = None
        unknown = next((t.script.no_attention for t in tenants if t.script.attention is None), None)
        if unknown is not None:
            assumed[f"retained attention mass is not known: {unknown}"] = None
        figures = summary(self.turns, self.counter, extra)
        return Simulated(figures, tuple(self.turns), self.settings.rules() | rules, tuple(assumed))


class _Asking:
    """A `CostModel` that remembers what was asked for, and the first price that was not there: taking back what was
    begun asks for others.
    """

    def __init__(self, costs: CostTable) -> None:
        self._costs = costs
        self.failure: CostsError | None = None
        self.kinds: set[WorkKind] = set()

    def cost_ns(self, work: Work) -> int:
        self.kinds.add(work.kind)
        try:
            return self._costs.cost_ns(work)
        except CostsError as err:
            self.failure = self.failure or err
            raise


class _Tenant:
    """A conversation: waits for its turns, for the machine, and carries them out."""

    def __init__(self, world: _World, script: Script, n_ctx_train: int | None, told: frozenset[str]) -> None:
        self.name, self.script = script.row.session_id, script
        self.modelled = model_session(script, world.settings, world.costs, n_ctx_train)
        shape = self.modelled.shape
        self.n_bytes = shape.n_ctx * shape.row_bytes
        self.not_repeated = self.lost_caches = 0
        self._world = world
        self._time = SimTimeline(world.env, world.link)
        self._slot_time = SlotTimeline(self._time)
        sinks = world.sinks if self.name in told else ()
        sink = ChargingSink((world.counter, *sinks), world.asking, self._time)
        setup = Setup(
            shape,
            self.modelled.policy,
            world.asking,
            world.run_id,
            script.evict_by,
            self.modelled.repeat,
            script.attention,
            script.defer_prefill,
        )
        self.player = Player(setup, self.name, sink, self._slot_time)

    def displaced(self) -> None:
        self.player.close("displaced")

    def lost(self, slot: int) -> None:
        self.lost_caches += 1
        self.player.lose(slot_failed(slot))

    def live(self) -> Wait:
        world, ended = self._world, 0
        for i, turn in enumerate(self.script.turns):
            arrived = self._arrival(turn, ended, first=i == 0)
            if arrived > world.env.now:
                yield world.env.timeout(arrived - int(world.env.now))
            if world.server.fits(self):
                yield from self._carried_out(turn, arrived, last=i + 1 == len(self.script.turns))
            else:
                self._unserved(turn, arrived, f"its context takes {self.n_bytes} bytes of KV, more than the memory has")
            ended = int(world.env.now)

    def _carried_out(self, turn: Turn, arrived: int, *, last: bool) -> Wait:
        """On one slot after another, until one holds till the end or none is left."""
        world, lost = self._world, 0
        while True:
            slot = yield from world.server.acquire(self)
            if slot is None:
                self._unserved(turn, arrived, f"no slot is left: {world.server.dead} have failed", lost)
                return
            self._slot_time.on(slot, world.server.fails_at(slot))
            kept = yield from self._serve(turn, arrived, lost)
            if kept:
                break
            lost += 1
            self.lost_caches += 1
            self.player.close()
            world.server.release(self, keep=False)
        keep = world.settings.affinity and not last
        if not keep:
            self.player.close("asked")
        world.server.release(self, keep=keep)

    def _arrival(self, turn: Turn, ended: int, *, first: bool) -> int:
        settings = self._world.settings
        if settings.arrivals == "open" or first:
            return settings.paced(turn.at_ns)
        return ended + settings.paced(turn.think_ns)

    def _serve(self, turn: Turn, arrived: int, lost: int) -> Generator[simpy.Event, Any, bool]:
        """Whether the slot lasted; a turn that was lost with its slot has no result yet."""
        env, done = self._world.env, Done()
        began = int(env.now)

        def call() -> None:
            self.player.turn(turn.steps, turn.tape, done)

        yield from self._time.run(call)
        if done.slot_failed:
            return False
        self.not_repeated += done.not_repeated
        ended = int(env.now)
        outcome = "refused" if done.why is not None and done.prompted_ns is None else "served"
        if outcome == "served" and (done.why is not None or done.generated < done.wanted):
            outcome = "cut_short"
        prompted = ended if done.prompted_ns is None else done.prompted_ns
        self._world.done(
            TurnResult(
                self.name,
                turn.number,
                arrived,
                began,
                prompted,
                ended,
                done.decode_ns,
                done.generated,
                outcome,
                done.why,
                done.mass,
                lost,
            )
        )
        return True

    def _unserved(self, turn: Turn, arrived: int, why: str, lost: int = 0) -> None:
        now = int(self._world.env.now)
        self._world.done(TurnResult(self.name, turn.number, arrived, now, now, now, 0, 0, "unserved", why, None, lost))
