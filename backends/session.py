"""Session: the only controller of a backend. Planner, backend, log and clock are handed in; it owns tape and fold.

One `Session` runs live and in simulation; what differs is the backend. Every call either does its work and records
it, or refuses with a typed error, records the refusal and changes nothing, or fails for good (`SessionFatal`).
A KeyboardInterrupt in the middle of a call closes the session; `cancel` stops it where its state is whole.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvtape.backends import carried, cold_steps, deferred, feeding, prefix, room, scoring, surgery
from kvtape.backends.catalog import BlockCatalog, Stretch
from kvtape.backends.cold_store import open_store
from kvtape.backends.errors import (
    ChoiceFailed,
    ContextOverflow,
    InputRejected,
    UnknownBlock,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.explain import Explanation, explain
from kvtape.backends.feasible import check_policy, check_precision, may_recompute
from kvtape.backends.guard import GuardedSession, Snapshot
from kvtape.backends.journal import Journal
from kvtape.backends.parts import Parts, session_row
from kvtape.backends.prefix import Reuse
from kvtape.backends.protocol import AttentionMass, Backend, Choose, Clock, EventSink, Logits
from kvtape.backends.shadow import Shadow
from kvtape.backends.speculation.drafter import Drafter
from kvtape.backends.verifying import Verifier, as_verifier
from kvtape.planner.blocks import PromptSegment
from kvtape.planner.deferral import DEFERRED
from kvtape.planner.events import Op, Placement, Way
from kvtape.planner.opening import Opening
from kvtape.planner.ranges import RangeSet
from kvtape.planner.specs import PolicySpec

if TYPE_CHECKING:
    from kvtape.backends.speculation.spec import Speculation

__all__ = ["DecodeResult", "PrefixStatus", "Session", "SuffixStatus"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrefixStatus:
    """Counters of one `ensure_prefix`: `reused + forgotten + prefilled` is the prefix length."""

    reused: int
    forgotten: int
    prefilled: int
    dropped: int


@dataclass(frozen=True, slots=True)
class SuffixStatus:
    suffix: int


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """Generated tokens, and why generation ended: `n`, `end_token`, `chosen_none` or `context_full`."""

    tokens: tuple[int, ...]
    stopped: str


class Session(GuardedSession):
    """One conversation on one backend.

    `allow_recompute` defaults to whether a cold store is configured, and to true with `evict_by="recompute"`, which
    carries evicts out by rebuilding from the survivors where the backend could do surgery. A `shadow` measures dense
    attention beside the session and ends with it; its clock must be the session's.

    With `defer_prefill` a prompt waits on the tape until a decode, which computes all that waits first (see
    `backends.deferred`); what else needs its rows (`evict`, `admit`, `compact`, `score`, `plan_now`, `snapshot`,
    `set_policy`, `logits`) computes it before it begins. `resident` speaks of what was computed.

    With `speculation` a decode looks at proposed tokens, several in a call of the engine, and generates the same ones
    (see `backends.speculation`). What it opens ends with the session.
    """

    def __init__(
        self,
        backend: Backend,
        policy: PolicySpec,
        sink: EventSink,
        clock: Clock,
        *,
        run_id: str,
        session_id: str,
        content: bool = False,
        allow_recompute: bool | None = None,
        evict_by: str = "native",
        shadow: Shadow | None = None,
        defer_prefill: bool = False,
        speculation: Speculation | None = None,
    ) -> None:
        precision = check_precision(backend)
        if speculation is not None and isinstance(why := as_verifier(backend), str):
            raise UnsupportedOperation("speculation", why)
        check_policy(policy, backend, evict_by=evict_by, allow_recompute=allow_recompute, precision=precision)
        if shadow is not None and shadow.clock is not clock:
            raise UsageError("a shadow's time is taken out of its own clock: give the session the same one")
        parts = Parts(
            backend=backend,
            journal=Journal(sink, clock, run_id, session_id),
            catalog=BlockCatalog(policy.block),
            policy=policy,
            cold=open_store(backend.config),
            allow_recompute=may_recompute(backend, evict_by, allow_recompute),
            evict_by_recompute=evict_by == "recompute",
            precision=precision,
            drafter=None if speculation is None else speculation.open(backend),
        )
        super().__init__(parts, shadow)
        self._restore_cost: dict[str, int] | None = None
        self._defer = defer_prefill
        sink.open_session(session_row(self._parts, run_id, session_id, content=content))
        began = self._parts.now()
        drafts = None if speculation is None else speculation.spec
        opening = Opening(precision.subject, precision.certified, defer_prefill, drafts)
        self._parts.journal.emit(
            Op.OPEN, began, n_tokens=backend.n_ctx, reason=policy.canonical, detail=opening.detail()
        )

    @property
    def tape(self) -> tuple[int, ...]:
        """The token ids fed and generated so far; an index is a tape position."""
        return (*self._parts.tape, *self._parts.pending.tokens)

    @property
    def pending_tokens(self) -> int:
        """How many tokens at the end of the tape wait to be computed; 0 without deferred prefill."""
        return self._parts.pending.n_tokens

    @property
    def logits(self) -> Logits | None:
        """float32 `[n_vocab]` after the last token; None when nothing was computed since a change.

        Computes what waits, and raises what that raises.
        """
        if self._parts.pending and not self.ended:
            with self._operation("logits"):
                self._settle()
        return self._parts.logits

    @property
    def resident(self) -> RangeSet:
        return self._parts.state.resident

    @property
    def cold_block_ids(self) -> tuple[int, ...]:
        return tuple(b.block_id for b in self._parts.state.cold)

    def ensure_prefix(
        self, prompt: Sequence[int] | Sequence[PromptSegment], *, need_logits: bool = True
    ) -> PrefixStatus:
        """Make the tape equal to `prompt`, reusing the longest common prefix.

        A lossy policy with `hole=forget` runs on past evicted holes; `hole=refill` first re-admits or recomputes
        them, or ends the reuse at the hole. With `need_logits` at least the last token is computed.
        """
        return _run_out(self.prefix_steps(prompt, need_logits=need_logits))

    def prefix_steps(
        self, prompt: Sequence[int] | Sequence[PromptSegment], *, need_logits: bool = True
    ) -> Generator[None, None, PrefixStatus]:
        """`ensure_prefix` with a pause between its calls of the engine, of at most `chunk` tokens each.

        In a pause the operation still runs: every other call of this session is refused (SessionBusy), a `cancel` is
        for the next step, and other sessions of the engine may work. The log is that of `ensure_prefix`. A generator
        that is closed before its end closes the session, as an interrupt does.
        """
        with self._operation("ensure_prefix"):
            segments = prefix.as_segments(prompt)
            tokens = prefix.check_tokens(self._parts, (t for s in segments for t in s.tokens or ()))
            stretches = prefix.stretches(segments, 0)
            if self._parts.policy.hole == "refill":
                if self._parts.state.dropped or self._parts.state.cold:
                    self._settle()  # what waits does not see the holes that are filled for a later prompt
                cold_steps.drop_damaged(self._parts, prefix.common_prefix(self._parts.tape, tokens))
            reuse = prefix.plan_reuse(self._parts, tokens, need_logits)
            deferred.refuse_overflow(self._parts, reuse.keep, len(tokens) - reuse.keep, stretches)
            return (yield from self._run_prefix(tokens, stretches, reuse))

    def prefill_suffix(self, tokens: Sequence[int], *, kind: str = "user") -> SuffixStatus:
        """Compute `tokens` behind the prefix; they are part of the tape, not of the prefix."""
        parts = self._parts
        with self._operation("prefill_suffix"):
            tokens = prefix.check_tokens(parts, tokens)
            start = len(parts.tape) + parts.pending.n_tokens
            stretches = prefix.stretches([PromptSegment(kind=kind, tokens=tuple(tokens))], start)
            deferred.refuse_overflow(parts, start, len(tokens), stretches)
            counters = {"suffix": len(tokens), "prompt_tokens": len(tokens)}
            self._prompt(start, len(tokens), counters, waits=self._defer, reason="suffix")
            _run_out(self._feed(tokens, stretches, start, counters))
            return SuffixStatus(suffix=len(tokens))

    def decode(
        self,
        n: int,
        *,
        choose: Choose | None = None,
        stop_tokens: frozenset[int] | None = None,
    ) -> DecodeResult:
        """Generate up to `n` tokens, greedy unless `choose` is given; every one goes on the tape.

        A token of `stop_tokens` (default: the model's end tokens) ends the run and is not put on the tape. Cancelled,
        or when `choose` raises (ChoiceFailed), all its tokens are taken back, unless it has evicted for them. What
        waits is computed before; cancelled there, it waits again.
        """
        parts = self._parts
        stops = parts.backend.facts.end_tokens if stop_tokens is None else stop_tokens
        pick = choose or _greedy
        ended = "n"

        def choose_next(logits: Logits) -> int | None:
            nonlocal ended
            try:
                token = pick(logits)
            except Exception as err:
                raise ChoiceFailed(f"choose raised {err!r}") from err
            if token is None:
                ended = "chosen_none"
            elif token in stops:
                ended, token = "end_token", None
            return token

        with self._operation("decode"):
            if not isinstance(n, int) or n <= 0:
                raise InputRejected(f"decode {n!r} tokens: ask for a whole number of at least 1")
            self._settle(folded=True)
            if self._parts.logits is None:
                raise InputRejected("nothing to decode from: prefill at least one token first")
            drafter = self._drafter(choose)
            parts.journal.emit(Op.GENERATE, parts.now(), n_tokens=n, reason=_stop_rule(choose, stops))
            produced: list[int] = []
            with self._roll_back(len(parts.tape)):
                while len(produced) < n and ended == "n":
                    try:
                        produced += feeding.decode_run(parts, n - len(produced), choose_next, drafter)
                    except ContextOverflow:
                        if not produced:
                            raise
                        ended = "context_full"
            return DecodeResult(tuple(produced), ended)

    def evict(self, start: int, stop: int, *, reason: str = "asked") -> None:
        """Evict the resident tokens of `[start, stop)`, whatever the policy thinks of them.

        The last resident token stays always: what is computed next goes on from it.
        """
        with self._operation("evict"):
            self._settle()
            whole = isinstance(start, int) and isinstance(stop, int)
            wanted = RangeSet([(start, stop)]) if whole and 0 <= start < stop else RangeSet()
            resident = self._parts.state.resident
            if not wanted or not wanted.issubset(resident):
                raise InputRejected(f"evict [{start!r}, {stop!r}): resident is {resident}")
            if stop == resident.ranges[-1].stop:
                raise InputRejected(f"evict [{start}, {stop}): token {stop - 1} is the last resident one and stays")
            way = surgery.choose_way(self._parts)
            if way is None:
                why = self._parts.refusal("remove_middle") or "no way to carry it out"
                raise UnsupportedOperation("evict", why)
            surgery.evict(self._parts, [(start, stop)], way, reason)

    def admit(self, block_id: int, placement: Placement = Placement.IN_PLACE, *, reason: str = "asked") -> None:
        """Bring a cold block back, in its own place or behind the last row."""
        with self._operation("admit"):
            self._settle()
            surgery.admit(self._parts, block_id, placement, reason)

    def compact(self) -> int:
        """Close all holes of the cache by re-rotation; returns how many positions were won."""
        with self._operation("compact"):
            self._settle()
            return surgery.compact(self._parts, "asked")

    def score(self, tokens: Sequence[int]) -> AttentionMass:
        """What `tokens` would attend to behind the tape, for instance a question; nothing of them remains.

        A policy that ranks by a probe uses it until the tape grows. Needs attention_scores.
        """
        with self._operation("score"):
            self._parts.require("score", "attention_scores")
            prefix.check_tokens(self._parts, tokens)
            self._settle()
            return scoring.probe(self._parts, tokens)

    def plan_now(self, limit: int | None = None) -> None:
        """Plan and evict at once, down to one token below `limit` (default: the policy's own)."""
        with self._operation("plan_now"):
            if limit is not None and (not isinstance(limit, int) or limit < 2):
                raise InputRejected(f"plan_now to {limit!r}: give a whole number of at least 2 tokens")
            self._settle()
            room.plan_now(self._parts, limit)

    def set_policy(self, policy: PolicySpec) -> None:
        """Use another policy from now on; plans record which one ruled."""
        with self._operation("set_policy"):
            if not isinstance(policy, PolicySpec):
                raise UsageError(f"policy {policy!r}: give what parse_policy returns")
            parts = self._parts
            evict_by = "recompute" if parts.evict_by_recompute else "native"
            check_policy(
                policy,
                parts.backend,
                evict_by=evict_by,
                allow_recompute=parts.allow_recompute,
                precision=parts.precision,
            )
            if policy.block != self._parts.policy.block:
                raise UsageError(
                    f"block={policy.block}: this session cuts blocks of {self._parts.policy.block}"
                    "; give that, or open another session"
                )
            self._settle()
            scoring.follow(self._parts, policy)
            self._parts.policy = policy

    def snapshot(self) -> int:
        """Save the whole state; returns the snapshot's id."""
        parts = self._parts
        with self._operation("snapshot"):
            parts.require("snapshot", "snapshot_state")
            self._settle()
            began = parts.now()
            carried.carry(parts)
            blob = parts.backend.snapshot()
            snapshot_id = len(self._snapshots)
            self._snapshots[snapshot_id] = Snapshot(
                blob, tuple(parts.tape), parts.catalog.copy_blocks(), parts.history, parts.carried
            )
            parts.journal.emit(
                Op.SNAPSHOT,
                began,
                snapshot_id=snapshot_id,
                n_tokens=parts.state.resident_tokens,
                elapsed_ns=parts.now() - began,
                detail=json.dumps({"bytes": len(blob)}),
            )
            return snapshot_id

    def restore(self, snapshot_id: int) -> None:
        """Put a snapshot back; the tape becomes the snapshot's, and its generation goes up. Nothing waits any more."""
        parts = self._parts
        with self._operation("restore"):
            parts.require("restore", "snapshot_state")
            saved = self._snapshots.get(snapshot_id)
            if saved is None:
                raise UnknownBlock(f"snapshot {snapshot_id} was never taken (taken: {sorted(self._snapshots)})")
            began = parts.now()
            parts.backend.restore(saved.blob)
            parts.tape[:] = saved.tape
            parts.pending.cut(0)
            parts.catalog.restore_blocks(saved.catalog)
            carried.take_back(parts, saved.history, saved.carried)
            self._parts.logits = None
            elapsed = parts.now() - began
            # What the engine has back; what of it can be reused is the event's resident_tokens, from the fold.
            restored = sum(s.length for s in parts.backend.books())
            self._restore_cost = {"elapsed_ns": elapsed, "bytes": len(saved.blob)}
            parts.journal.emit(
                Op.RESTORE,
                began,
                snapshot_id=snapshot_id,
                n_tokens=restored,
                way=Way.IMPORT,
                elapsed_ns=elapsed,
                kv_bytes=parts.resident_bytes(),
            )
            cold_steps.forget_invalid(parts)

    def explain(self) -> Explanation:
        """The whole account: works on open, fatal and closed sessions alike."""
        fatal = self._fatal
        told = None if fatal is None else f"{fatal.fatal_class}: {fatal.cause_message}"
        return explain(self._parts, told, self._closed, self._restore_cost)

    def _drafter(self, choose: Choose | None) -> Drafter | None:
        """Who proposes tokens to a decode.

        Nobody where somebody else than the session chooses, from logits that are not to the bit those of single calls:
        how near two choices are to him is not known.
        """
        drafter, backend = self._parts.drafter, self._parts.backend
        if drafter is None or choose is None:
            return drafter  # without either nobody asks the engine what it would take to measure
        return drafter if isinstance(backend, Verifier) and backend.verify_margin == 0 else None

    # -- the steps -----------------------------------------------------------------------------------------------

    def _run_prefix(
        self, tokens: list[int], stretches: Sequence[Stretch], reuse: Reuse
    ) -> Generator[None, None, PrefixStatus]:
        parts = self._parts
        # Of the tape: what waits behind it is neither resident nor forgotten, and is computed with the rest.
        kept = min(reuse.keep, len(parts.tape))
        below = (parts.state.resident & RangeSet([(0, kept)])).n_tokens
        reused = below + sum(h.stop - h.start for h in reuse.holes)
        status = PrefixStatus(
            reused=reused,
            forgotten=kept - reused,
            prefilled=len(tokens) - kept,
            dropped=parts.state.resident_tokens - below,
        )
        counters = dataclasses.asdict(status) | {"prompt_tokens": len(tokens)}
        self._prompt(kept, len(tokens), counters, waits=self._defer and kept < len(tokens))
        if reuse.keep < len(parts.tape):
            surgery.truncate(parts, reuse.keep, reuse.reason)
            parts.logits = None
        parts.pending.cut(reuse.keep)
        for hole in reuse.holes:
            if hole.block_id is not None:
                surgery.admit(parts, hole.block_id, Placement.IN_PLACE, "hole")
            else:
                surgery.refill(parts, hole.start, hole.stop, "hole")
            parts.logits = None
            yield
        parts.catalog.touch(0, reuse.keep, parts.state.turn)
        yield from self._feed(tokens[reuse.keep :], stretches, reuse.keep, counters)
        return status

    def _prompt(self, start: int, n: int, counters: dict[str, int], *, waits: bool, reason: str | None = None) -> None:
        """The prompt's event. The first prefill bears the counters; one that computes nothing, or waits, has only its
        prompt to bear them.
        """
        parts = self._parts
        on_prompt: dict[str, Any] = dict(counters) if waits or (reason is None and start == n) else {}
        detail = DEFERRED if waits else None
        parts.journal.emit(Op.PROMPT, parts.now(), start=start, n_tokens=n, reason=reason, detail=detail, **on_prompt)

    def _feed(
        self, tokens: list[int], stretches: Sequence[Stretch], start: int, counters: dict[str, int]
    ) -> Generator[None]:
        if self._defer:
            deferred.offer(self._parts, start, tokens, stretches)
            return
        with self._roll_back(start):
            yield from feeding.feed(self._parts, tokens, stretches, start, counters)


def _run_out(steps: Generator[None, None, T]) -> T:
    """What the steps come to, without a pause."""
    while True:
        try:
            next(steps)
        except StopIteration as ended:
            result: T = ended.value
            return result


def _greedy(logits: Logits) -> int:
    return int(logits.argmax())


def _stop_rule(choose: Choose | None, stops: frozenset[int]) -> str:
    return ("greedy" if choose is None else "given") + (":end_tokens" if stops else ":n")
