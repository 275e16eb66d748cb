"""Several turns through the real Session: after each, the fold of the events, books and memory are one account."""

from __future__ import annotations

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import ContextOverflow, EngineFault, InputRejected, SessionFatal, UnsupportedOperation
from kvtape.backends.session import Session
from kvtape.planner.events import Op, Placement
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.bench import Bench, NotApplicable
from kvtape.testing.sink import ListSink

__all__ = [
    "class_session",
    "deferred_session",
    "fatal_session",
    "scored_session",
    "session_without_scores",
    "streaming_session",
    "surgery_session",
    "turns",
]


class _Play:
    """A Session on the bench's backend."""

    def __init__(self, bench: Bench, policy: str, *, defer: bool = False) -> None:
        self.bench, self.sink = bench, ListSink()
        self.session = Session(
            bench.backend,
            parse_policy(policy),
            self.sink,
            ManualClock(),
            run_id="conformance",
            session_id="s",
            defer_prefill=defer,
        )

    def check(self, what: str) -> None:
        """The fold of what was recorded says what books and memory must hold."""
        bench = self.bench
        try:
            state = fold(self.sink.events)
        except ValueError as err:
            bench.fail(f"after {what}: the events do not fold: {err}")
        bench.layout, bench.tape = state.layout, list(self.session.tape)
        if state.tape_length != len(bench.tape):
            bench.fail(f"after {what}: the fold's tape has {state.tape_length} tokens, the session's {len(bench.tape)}")
        bench.check(what)

    def offer(self, seed: int) -> None:
        """A prefix that goes on, and a suffix."""
        bench, session = self.bench, self.session
        bench.does("a prefix", lambda: session.ensure_prefix([*session.tape, *bench.draw(4, seed)]))
        bench.does("a suffix", lambda: session.prefill_suffix(bench.draw(2, seed + 1)))

    def turn(self, prompt: list[int], n_decode: int = 0) -> None:
        bench, n = self.bench, len(prompt)
        status = bench.does(f"a turn of {n} tokens", lambda: self.session.ensure_prefix(prompt))
        if status.reused + status.forgotten + status.prefilled != n:
            bench.fail(f"a turn of {n} tokens: {status} does not add up")
        self.check(f"a turn of {n} tokens")
        if n_decode:
            done = bench.does(f"decode of {n_decode}", lambda: self.session.decode(n_decode, stop_tokens=frozenset()))
            if len(done.tokens) != n_decode:
                bench.fail(f"decode of {n_decode} gave {len(done.tokens)} tokens, stopped {done.stopped!r}")
            self.check(f"decode of {n_decode}")


def turns(bench: Bench) -> None:
    """Turns that go on, diverge and shrink; a prompt that does not fit, and a bad token, change nothing."""
    play = _Play(bench, "none")
    first = bench.draw(20)
    play.turn(first, 4)
    play.turn([*play.session.tape, *bench.draw(9, 1)], 3)
    play.turn([*first[:11], *bench.draw(7, 2)], 2)
    play.turn(first[:5])
    bench.does("prefill_suffix", lambda: play.session.prefill_suffix(bench.draw(6, 3)))
    play.check("prefill_suffix")
    too_long = bench.draw(bench.backend.n_ctx + 1, 4)
    bench.refuses("a prompt past the context", lambda: play.session.ensure_prefix(too_long), ContextOverflow)
    bench.refuses("a token of -1", lambda: play.session.prefill_suffix([-1]), InputRejected)
    if [e.op for e in play.sink.events[-2:]] != [Op.REFUSE, Op.REFUSE]:
        bench.fail("two refusals must be two events")
    play.check("refusals")


def deferred_session(bench: Bench) -> None:
    """Prompts that wait leave the engine alone until a decode, which has an eager session's rows in fewer pieces."""
    eager, twin = _Play(bench, "none"), bench.twin()
    lazy = _Play(twin, "none", defer=True)
    for seed in (20, 30):
        rows = twin.image()
        for play in (eager, lazy):
            play.offer(seed)
        if twin.image() != rows:
            bench.fail("prompts that wait changed rows")
        for play in (eager, lazy):
            forced = iter(play.bench.draw(3, seed + 2))
            play.bench.does("decode", lambda s=play.session, f=forced: s.decode(3, choose=lambda _: next(f)))  # type: ignore[misc]
            play.check("decode")
    if (lazy.session.tape, twin.layout) != (eager.session.tape, bench.layout):
        bench.fail(f"deferring, {twin.layout} is resident, without it {bench.layout}")
    pieces = [sum(e.op is Op.PREFILL for e in play.sink.events) for play in (eager, lazy)]
    if pieces != [4, 2]:
        bench.fail(f"four prompts of two turns are 4 prefills, deferred 2, not {pieces}")
    twin.close()


def streaming_session(bench: Bench) -> None:
    """A text of more than twice the context streams through; sinks and the recent tokens stay."""
    n_ctx = bench.backend.n_ctx
    play = _Play(bench, f"stream:sink=4,recent={n_ctx // 4},block=8")
    _needs_a_way(bench)
    text = bench.draw(2 * n_ctx + 10, 5)
    play.turn(text, 3)
    if not all(p in play.session.resident for p in (0, 3, len(text) - 1)):
        bench.fail(f"sinks and recent tokens must stay resident, resident is {play.session.resident}")
    if max(e.resident_tokens or 0 for e in play.sink.events) > n_ctx:
        bench.fail(f"more than {n_ctx} tokens were resident at an event")


def class_session(bench: Bench) -> None:
    """A budget below the context: blocks go and come back turn by turn."""
    _needs_a_way(bench)
    play = _Play(bench, "class:budget=48,block=8,recent=8")
    first = bench.draw(40, 6)
    play.turn(first, 2)
    play.turn([*play.session.tape, *bench.draw(30, 7)], 2)
    play.turn([*play.session.tape, *bench.draw(5, 8)], 2)
    play.turn([*play.session.tape[:30], *bench.draw(8, 9)], 1)


def scored_session(bench: Bench) -> None:
    """Scored policies measure before they plan, on record; a probe decides a plan, and leaves nothing."""
    _needs_a_way(bench)
    play = _Play(bench, "h2o:budget=40,recent=8,block=4")
    play.turn(bench.draw(56, 12), 2)
    for policy in ("snapkv:budget=32,window=4,block=4", "tova:budget=28,block=4"):
        bench.does("set_policy", lambda text=policy: play.session.set_policy(parse_policy(text)))  # type: ignore[misc]
        bench.does("plan_now", play.session.plan_now)
        play.check(f"plan_now under {policy}")
    play.session.set_policy(parse_policy("snapkv:budget=24,queries=probe,block=4"))
    rows, tape = bench.image(), play.session.tape
    mass = bench.does("score", lambda: play.session.score(bench.draw(5, 13)), "attention_scores")
    if bench.image() != rows or play.session.tape != tape:
        bench.fail("a probe changed rows or the tape")
    bench.does("plan_now", play.session.plan_now)
    play.check("plan_now with a probe")
    gone = set(mass.tape_positions.tolist()) - {p for r in play.session.resident for p in range(r.start, r.stop)}
    if not gone or play.session.resident.n_tokens >= 24:
        bench.fail(f"plan_now left {play.session.resident.n_tokens} tokens resident, the budget is 24")
    asked = [e.op for e in play.sink.events if e.op in (Op.SCORE, Op.PLAN)]
    if asked != [Op.SCORE, Op.PLAN] * (len(asked) // 2):
        bench.fail(f"each plan follows its score, the log has {[str(op) for op in asked]}")
    if any("scores_missing" in plan.diagnostics for plan in play.sink.plans):
        bench.fail("a plan says scores_missing, although attention_scores is true")


def session_without_scores(bench: Bench) -> None:
    """Where attention_scores is false, scored policies keep what `stream` keeps, and say why."""
    if bench.backend.capabilities.attention_scores:
        raise NotApplicable("attention_scores is true; what it promises is executed by its own scenarios")
    _needs_a_way(bench)
    play, like = _Play(bench, "snapkv:budget=40,window=8,sink=4,block=4"), bench.twin()
    text = bench.draw(62, 12)
    play.turn(text)
    stream = _Play(like, "stream:sink=4,recent=36,block=4")
    like.does("set_policy", lambda: play.session.set_policy(parse_policy("snapkv:budget=32,window=8,sink=4,block=4")))
    play.session.plan_now()
    play.check("plan_now")
    stream.turn(text)
    stream.session.set_policy(parse_policy("stream:sink=4,recent=27,block=4"))
    stream.session.plan_now(32)
    if play.session.resident != stream.session.resident:
        bench.fail(f"without scores {play.session.resident} stays, under stream {stream.session.resident}")
    if not any("scores_missing" in plan.diagnostics for plan in play.sink.plans):
        bench.fail("no plan says scores_missing, although attention_scores is false")
    rows = bench.image()
    bench.refuses("score with attention_scores false", lambda: play.session.score(text[:2]), UnsupportedOperation)
    if bench.image() != rows:
        bench.fail("a refused score changed the rows")
    like.close()


def surgery_session(bench: Bench) -> None:
    """What a user may ask of a session by hand: evict, admit in both placements, compact, snapshot, restore."""
    play, can = _Play(bench, "none:block=4,hole=forget"), bench.backend.capabilities
    session = play.session
    play.turn(bench.draw(24, 10), 2)
    saved = bench.does("snapshot", session.snapshot, "snapshot_state") if can.snapshot_state else None
    if can.remove_middle:
        for start, placement in ((4, Placement.IN_PLACE), (12, Placement.APPEND)):
            bench.does("evict", lambda a=start: session.evict(a, a + 4))  # type: ignore[misc]
            play.check(f"evict of [{start}, {start + 4})")
            if can.cold_store and (can.position_shift or placement is Placement.IN_PLACE):
                block = session.cold_block_ids[-1]
                bench.does("admit", lambda b=block, p=placement: session.admit(b, p))  # type: ignore[misc]
                play.check(f"admit {placement}")
        session.evict(16, 20)
        if can.position_shift:
            bench.does("compact", session.compact)
            play.check("compact")
    if saved is not None:
        bench.does("restore", lambda: session.restore(saved), "snapshot_state")
        play.check("restore")
    play.turn([*session.tape, *bench.draw(3, 11)], 1)
    session.close()


def fatal_session(bench: Bench) -> None:
    """A failure of the engine poisons the session: the first cause stays, the context is freed, the log folds."""
    abort_next = bench.abort_hook()
    play = _Play(bench, "none")
    play.turn(bench.draw(10))
    abort_next()
    causes = []
    for n in (1, 2):
        try:
            play.session.prefill_suffix(bench.draw(3, n))
        except SessionFatal as err:
            causes.append(err.cause_message)
        except EngineFault as err:  # pragma: no cover - the Session's own fault
            bench.fail(f"the session let an engine fault through: {err}")
    if len(causes) != 2 or causes[0] != causes[1]:
        bench.fail(f"a failure of the engine must be the cause of every later refusal, got {causes}")
    play.session.close()
    state = fold(play.sink.events)
    if state.fatal is None or not state.closed:
        bench.fail(f"the log must end fatal and closed, it is fatal={state.fatal!r} closed={state.closed}")


def _needs_a_way(bench: Bench) -> None:
    can = bench.backend.capabilities
    if not (can.remove_middle or (can.recompute_range and bench.config.cold_budget_tokens)):
        raise NotApplicable("nothing can be evicted here, neither by removing rows nor by recompute")
