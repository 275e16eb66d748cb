"""Session: the only controller of a backend. Planner, backend, log and clock are handed in; it owns tape and fold.

One `Session` runs live and in simulation; what differs is the backend. Every call either does its work and records
it, or refuses with a typed error, records the refusal and changes nothing, or fails for good (`SessionFatal`).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from kvtape.backends import room, surgery
from kvtape.backends.catalog import BlockCatalog, SegmentKind, Stretch
from kvtape.backends.cold_store import ColdStore
from kvtape.backends.errors import (
    Cancelled,
    ContextOverflow,
    EngineFault,
    FatalClass,
    InputRejected,
    SessionClosed,
    SessionFatal,
    UnknownBlock,
    UnsupportedOperation,
    UsageError,
)
from kvtape.backends.explain import Explanation, explain
from kvtape.backends.journal import Journal
from kvtape.backends.parts import Parts
from kvtape.backends.protocol import Backend, Choose, Clock, EventSink, Logits
from kvtape.planner.blocks import CacheClass, PromptSegment, default_class
from kvtape.planner.events import Op, Placement, Way
from kvtape.planner.plan import PlanError
from kvtape.planner.ranges import RangeSet
from kvtape.planner.rows import SessionRow
from kvtape.planner.specs import PolicySpec

__all__ = ["DECODE_RUN_TOKENS", "DecodeResult", "PrefixStatus", "Session", "SuffixStatus"]

DECODE_RUN_TOKENS = 32
"""An executed decode run is recorded at the latest after so many tokens: a kill loses at most the open run."""


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
    """Generated tokens, and why generation ended: `n`, `end_token` or `chosen_none`."""

    tokens: tuple[int, ...]
    stopped: str


@dataclass(frozen=True, slots=True)
class _Snapshot:
    blob: bytes
    tape: tuple[int, ...]
    catalog: Any


class Session:
    """One conversation on one backend.

    `allow_recompute` defaults to whether a cold store is configured (semantics §2). `evict_by="recompute"` carries
    evicts out by rebuilding from the survivors where the backend could do surgery.
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
    ) -> None:
        policy.check_context(backend.n_ctx)
        if evict_by not in ("native", "recompute"):
            raise UsageError(f"evict_by {evict_by!r}: choose native or recompute")
        budget = backend.config.cold_budget_tokens
        self._parts = Parts(
            backend=backend,
            journal=Journal(sink, clock, run_id, session_id),
            catalog=BlockCatalog(policy.block),
            policy=policy,
            cold=ColdStore(budget) if budget > 0 else None,
            allow_recompute=budget > 0 if allow_recompute is None else allow_recompute,
            evict_by_recompute=evict_by == "recompute",
        )
        self._check_positions(policy)
        self._logits: Logits | None = None
        self._fatal: SessionFatal | None = None
        self._closed = False
        self._snapshots: dict[int, _Snapshot] = {}
        self._restore_cost: dict[str, int] | None = None
        sink.open_session(_session_row(self._parts, run_id, session_id, content))
        began = self._parts.now()
        self._parts.journal.emit(Op.OPEN, began, n_tokens=backend.n_ctx, reason=policy.canonical)

    @property
    def tape(self) -> tuple[int, ...]:
        """The token ids fed and generated so far; an index is a tape position."""
        return tuple(self._parts.tape)

    @property
    def logits(self) -> Logits | None:
        """float32 `[n_vocab]` after the last computed token; None when nothing was computed since a change."""
        return self._logits

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
        with self._operation("ensure_prefix"):
            segments = _as_segments(prompt)
            tokens = [t for s in segments for t in s.tokens or ()]
            stretches = _stretches(segments, 0)
            self._check_tokens(tokens)
            keep = _common_prefix(self._parts.tape, tokens)
            keep = min(keep, len(tokens) - 1) if need_logits else keep
            holes, keep = self._plan_holes(keep)
            self._refuse_overflow(keep, len(tokens) - keep, stretches)
            return self._run_prefix(tokens, stretches, keep, holes)

    def prefill_suffix(self, tokens: Sequence[int], *, kind: str = "user") -> SuffixStatus:
        """Compute `tokens` behind the prefix; they are part of the tape, not of the prefix."""
        parts = self._parts
        with self._operation("prefill_suffix"):
            self._check_tokens(tokens)
            start = len(parts.tape)
            stretches = _stretches([PromptSegment(kind=kind, tokens=tuple(tokens))], start)
            self._refuse_overflow(start, len(tokens), stretches)
            parts.journal.emit(Op.PROMPT, parts.now(), start=start, n_tokens=len(tokens), reason="suffix")
            counters = {"suffix": len(tokens), "prompt_tokens": len(tokens)}
            with self._roll_back(start):
                self._feed(list(tokens), stretches, start, counters)
            return SuffixStatus(suffix=len(tokens))

    def decode(
        self,
        n: int,
        *,
        choose: Choose | None = None,
        stop_tokens: frozenset[int] | None = None,
    ) -> DecodeResult:
        """Generate up to `n` tokens, greedy unless `choose` is given; every one goes on the tape.

        A token of `stop_tokens` (default: the model's end tokens) ends the run and is not put on the tape.
        """
        parts = self._parts
        stops = parts.backend.facts.end_tokens if stop_tokens is None else stop_tokens
        pick = choose or _greedy
        ended = "n"

        def choose_next(logits: Logits) -> int | None:
            nonlocal ended
            token = pick(logits)
            if token is None:
                ended = "chosen_none"
            elif token in stops:
                ended, token = "end_token", None
            return token

        with self._operation("decode"):
            if n <= 0:
                raise InputRejected(f"decode {n} tokens: ask for at least 1")
            if self._logits is None:
                raise InputRejected("nothing to decode from: prefill at least one token first")
            parts.journal.emit(Op.GENERATE, parts.now(), n_tokens=n, reason=_stop_rule(choose, stops))
            produced: list[int] = []
            while len(produced) < n and ended == "n":
                produced += self._decode_run(n - len(produced), choose_next)
            return DecodeResult(tuple(produced), ended)

    def evict(self, start: int, stop: int, *, reason: str = "asked") -> None:
        """Evict the resident tokens of `[start, stop)`, whatever the policy thinks of them."""
        with self._operation("evict"):
            wanted = RangeSet([(start, stop)]) if 0 <= start < stop else RangeSet()
            if not wanted or not wanted.issubset(self._parts.state.resident):
                raise InputRejected(f"evict [{start}, {stop}): resident is {self._parts.state.resident}")
            way = surgery.choose_way(self._parts)
            if way is None:
                why = self._parts.backend.refusal("remove_middle") or "no way to carry it out"
                raise UnsupportedOperation("evict", why)
            surgery.evict(self._parts, [(start, stop)], way, reason)

    def admit(self, block_id: int, placement: Placement = Placement.IN_PLACE, *, reason: str = "asked") -> None:
        """Bring a cold block back, in its own place or behind the last row."""
        with self._operation("admit"):
            surgery.admit(self._parts, block_id, placement, reason)

    def compact(self) -> int:
        """Close all holes of the cache by re-rotation; returns how many positions were won."""
        with self._operation("compact"):
            return surgery.compact(self._parts, "asked")

    def set_policy(self, policy: PolicySpec) -> None:
        """Use another policy from now on; plans record which one ruled."""
        with self._operation("set_policy"):
            policy.check_context(self._parts.n_ctx)
            self._check_positions(policy)
            if policy.block != self._parts.policy.block:
                raise UsageError(f"block={policy.block}: this session cuts blocks of {self._parts.policy.block}")
            self._parts.policy = policy

    def snapshot(self) -> int:
        """Save the whole state; returns the snapshot's id."""
        parts = self._parts
        with self._operation("snapshot"):
            self._require("snapshot_state", "snapshot")
            began = parts.now()
            blob = parts.backend.snapshot()
            snapshot_id = len(self._snapshots)
            self._snapshots[snapshot_id] = _Snapshot(blob, tuple(parts.tape), parts.catalog.copy_blocks())
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
        """Put a snapshot back; the tape becomes the snapshot's, and its generation goes up."""
        parts = self._parts
        with self._operation("restore"):
            self._require("snapshot_state", "restore")
            saved = self._snapshots.get(snapshot_id)
            if saved is None:
                raise UnknownBlock(f"snapshot {snapshot_id} was never taken (taken: {sorted(self._snapshots)})")
            began = parts.now()
            parts.backend.restore(saved.blob)
            parts.tape[:] = saved.tape
            parts.catalog.restore_blocks(saved.catalog)
            self._logits = None
            elapsed = parts.now() - began
            self._restore_cost = {"elapsed_ns": elapsed, "bytes": len(saved.blob)}
            parts.journal.emit(
                Op.RESTORE,
                began,
                snapshot_id=snapshot_id,
                way=Way.IMPORT,
                elapsed_ns=elapsed,
                kv_bytes=parts.resident_bytes(),
            )
            if parts.cold is not None:
                parts.cold.keep_only([b.block_id for b in parts.state.cold])

    def explain(self) -> Explanation:
        """The whole account: works on open, fatal and closed sessions alike."""
        fatal = self._fatal
        return explain(self._parts, None if fatal is None else fatal.cause_message, self._closed, self._restore_cost)

    def cancel(self) -> None:
        """Ask the running operation to stop, from any thread; it raises Cancelled."""
        self._parts.backend.cancel()

    def close(self) -> None:
        """End the session in the ordinary way; idempotent, and allowed after a fatal."""
        if self._closed:
            return
        self._closed = True
        self._parts.journal.emit(Op.CLOSE, self._parts.now(), reason="fatal" if self._fatal else "asked")
        self._parts.backend.close()
        if self._parts.cold is not None:
            self._parts.cold.clear()
        self._snapshots.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- the guard around every operation ------------------------------------------------------------------------

    @contextmanager
    def _operation(self, name: str) -> Iterator[None]:
        if self._fatal is not None:
            raise SessionFatal(self._fatal.fatal_class, self._fatal.cause_message)
        if self._closed:
            raise SessionClosed(f"{name}: the session was closed; open another")
        try:
            yield
        except EngineFault as fault:
            raise self._go_fatal(fault.fatal_class, str(fault)) from fault
        except (UsageError, Cancelled, PlanError) as err:
            self._record_refusal(name, err)
            raise

    def _go_fatal(self, fatal_class: FatalClass, message: str) -> SessionFatal:
        """Record the first cause, free the native context for good, and give the error to raise."""
        self._fatal = SessionFatal(fatal_class, message)
        self._logits = None
        self._parts.journal.emit(Op.FATAL, self._parts.now(), error_class=str(fatal_class), reason=message)
        self._parts.backend.close()
        if self._parts.cold is not None:
            self._parts.cold.clear()
        self._snapshots.clear()
        return self._fatal

    def _record_refusal(self, operation: str, err: Exception) -> None:
        detail = None
        if isinstance(err, ContextOverflow):
            detail = json.dumps({"available": err.available, "needed": err.needed})
        self._parts.journal.emit(
            Op.REFUSE,
            self._parts.now(),
            error_class=type(err).__name__,
            reason=f"{operation}: {err}",
            detail=detail,
        )

    @contextmanager
    def _roll_back(self, tape_length: int) -> Iterator[None]:
        """On Cancelled, take back what the operation had computed; once it has evicted, that is not possible."""
        evictions = self._parts.evictions
        try:
            yield
        except Cancelled:
            if self._parts.evictions != evictions:
                self._logits = None
                self.close()
            elif len(self._parts.tape) > tape_length:
                surgery.truncate(self._parts, tape_length, "cancelled")
                self._logits = None
            raise

    # -- the steps -----------------------------------------------------------------------------------------------

    def _run_prefix(
        self, tokens: list[int], stretches: Sequence[Stretch], keep: int, holes: Sequence[_Hole]
    ) -> PrefixStatus:
        parts = self._parts
        parts.journal.emit(Op.PROMPT, parts.now(), start=keep, n_tokens=len(tokens))
        dropped = 0
        if keep < len(parts.tape):
            dropped = surgery.truncate(parts, keep, "diverged" if keep < len(tokens) - 1 else "shorter_or_equal")
            self._logits = None
        for hole in holes:
            if hole.block_id is not None:
                surgery.admit(parts, hole.block_id, Placement.IN_PLACE, "hole")
            else:
                surgery.refill(parts, hole.start, hole.stop, "hole")
            self._logits = None
        reused = parts.state.resident_tokens
        parts.catalog.touch(0, keep, parts.state.turn)
        status = PrefixStatus(reused, keep - reused, len(tokens) - keep, dropped)
        with self._roll_back(keep):
            self._feed(tokens[keep:], stretches, keep, dataclasses.asdict(status) | {"prompt_tokens": len(tokens)})
        return status

    def _feed(self, tokens: list[int], stretches: Sequence[Stretch], start: int, counters: dict[str, Any]) -> None:
        """Prefill `tokens` from tape position `start` in pieces, planning between them.

        The first piece's event bears the turn's counters.
        """
        parts = self._parts
        done = 0
        while done < len(tokens):
            n = room.make_room(parts, min(parts.backend.config.chunk, len(tokens) - done))
            piece = tokens[done : done + n]
            began, cache_start = parts.now(), parts.state.next_cache_position
            result = parts.backend.prefill(piece, start + done)
            elapsed = parts.now() - began
            parts.tape.extend(piece)
            blocks = parts.catalog.grow(stretches, len(parts.tape), op_start=start, clock=parts.state.turn)
            parts.journal.emit(
                Op.PREFILL,
                began,
                tokens=piece,
                block_rows=parts.block_rows(blocks),
                start=start + done,
                stop=start + done + n,
                n_tokens=n,
                cache_start=cache_start,
                physical_prefill_calls=result.calls,
                physical_prefill_tokens=result.tokens,
                token_count_source="engine",
                elapsed_ns=elapsed,
                kv_bytes=parts.resident_bytes(),
                **counters,
            )
            counters = {}
            parts.tokens_since_plan += n
            self._logits = result.logits
            done += n

    def _decode_run(self, wanted: int, choose: Choose) -> tuple[int, ...]:
        """One uninterrupted run: at most DECODE_RUN_TOKENS, and not past the next plan."""
        parts = self._parts
        room.make_room(parts, 1)
        n = min(wanted, DECODE_RUN_TOKENS, room.rows_before_plan(parts))
        assert self._logits is not None
        start, began, cache_start = len(parts.tape), parts.now(), parts.state.next_cache_position
        run = parts.backend.decode_until(n, parts.n_ctx, start, self._logits, choose)
        elapsed = parts.now() - began
        if not run.tokens:
            return ()
        parts.tape.extend(run.tokens)
        kind = SegmentKind("assistant", default_class("assistant"))
        blocks = parts.catalog.extend(len(run.tokens), kind, new_segment=False, clock=parts.state.turn)
        parts.journal.emit(
            Op.DECODE,
            began,
            tokens=run.tokens,
            block_rows=parts.block_rows(blocks),
            start=start,
            stop=start + len(run.tokens),
            n_tokens=len(run.tokens),
            cache_start=cache_start,
            completion_tokens=len(run.tokens),
            token_count_source="engine",
            decode_calls=run.calls,
            elapsed_ns=elapsed,
            kv_bytes=parts.resident_bytes(),
        )
        parts.tokens_since_plan += len(run.tokens)
        self._logits = run.logits
        return run.tokens

    # -- checks --------------------------------------------------------------------------------------------------

    def _plan_holes(self, keep: int) -> tuple[list[_Hole], int]:
        """What to put back below `keep`, and where the reuse really ends when a hole cannot be filled."""
        parts = self._parts
        if parts.policy.hole == "forget":
            return [], keep
        holes: list[_Hole] = []
        free = parts.n_ctx - (parts.state.resident & RangeSet([(0, keep)])).n_tokens
        for gap in RangeSet([(0, keep)]) - parts.state.resident:
            for block in parts.catalog.inside(gap.start, gap.stop):
                start, stop = max(block.start, gap.start), min(block.stop, gap.stop)
                cold = parts.state.cold_block(block.block_id)
                # A cold block that the cut goes through is of no use: the truncation drops it.
                whole = cold is not None and cold.stop <= keep
                free -= stop - start
                if free < 1 or not (whole or parts.backend.capabilities.recompute_range):
                    return holes, start
                holes.append(_Hole(start, stop, block.block_id if whole else None))
        return holes, keep

    def _refuse_overflow(self, reused_to: int, incoming: int, stretches: Sequence[Stretch]) -> None:
        """Refuse, before anything is touched, a prompt that cannot go through."""
        parts = self._parts
        if not parts.policy.evicts:
            resident = (parts.state.resident & RangeSet([(0, reused_to)])).n_tokens
            holes = reused_to - resident if parts.policy.hole == "refill" else 0
            if resident + holes + incoming > parts.n_ctx:
                raise ContextOverflow(resident + holes + incoming, parts.n_ctx, "policy none never evicts")
            return
        pinned = sum(s.stop - s.start for s in stretches if s.kind.cache_class is CacheClass.TASK_PINNED)
        least = pinned + parts.policy.recent + 1
        if least > parts.n_ctx:
            raise ContextOverflow(least, parts.n_ctx, f"{pinned} pinned tokens and the recent span are never evicted")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InputRejected("an empty prompt: give at least one token")
        n_vocab = self._parts.backend.facts.n_vocab
        for i, token in enumerate(tokens):
            if not 0 <= token < n_vocab:
                raise InputRejected(f"token {i} is {token}, the vocabulary has ids 0 to {n_vocab - 1}")

    def _check_positions(self, policy: PolicySpec) -> None:
        backend = self._parts.backend
        if (
            policy.evicts
            and policy.positions == "rebased"
            and not policy.ways(backend.capabilities, self._parts.allow_recompute)
        ):
            why = backend.refusal("position_shift") or backend.refusal("remove_middle") or "no way to carry it out"
            raise UnsupportedOperation(f"positions=rebased on {backend.name}", why)

    def _require(self, capability: str, operation: str) -> None:
        if not getattr(self._parts.backend.capabilities, capability):
            raise UnsupportedOperation(operation, self._parts.backend.refusal(capability) or f"no {capability}")


@dataclass(frozen=True, slots=True)
class _Hole:
    """A stretch below the common prefix to put back: from the cold store, or (block_id None) computed again."""

    start: int
    stop: int
    block_id: int | None


def _as_segments(prompt: Sequence[int] | Sequence[PromptSegment]) -> list[PromptSegment]:
    """Plain tokens are one user segment. Raises InputRejected for segments that were not tokenised."""
    segments = [p for p in prompt if isinstance(p, PromptSegment)]
    if not segments:
        return [PromptSegment(kind="user", tokens=tuple(prompt))]  # type: ignore[arg-type]
    if len(segments) != len(prompt):
        raise InputRejected("a prompt is tokens or segments, not both")
    missing = [s.kind for s in segments if s.tokens is None]
    if missing:
        raise InputRejected(f"segments without tokens: {', '.join(missing)}; tokenise them first")
    return segments


def _stretches(segments: Sequence[PromptSegment], at: int) -> list[Stretch]:
    """The segments laid on the tape from position `at`."""
    out: list[Stretch] = []
    for s in segments:
        stop = at + len(s.tokens or ())
        out.append(Stretch(at, stop, SegmentKind(s.kind, s.effective_class)))
        at = stop
    return out


def _common_prefix(tape: Sequence[int], tokens: Sequence[int]) -> int:
    n = min(len(tape), len(tokens))
    return next((i for i in range(n) if tape[i] != tokens[i]), n)


def _greedy(logits: Logits) -> int:
    return int(logits.argmax())


def _stop_rule(choose: Choose | None, stops: frozenset[int]) -> str:
    return ("greedy" if choose is None else "given") + (":end_tokens" if stops else ":n")


def _session_row(parts: Parts, run_id: str, session_id: str, content: bool) -> SessionRow:
    backend = parts.backend
    config = backend.config
    return SessionRow(
        run_id=run_id,
        session_id=session_id,
        backend=backend.name,
        engine_version=backend.engine_version,
        model_fingerprint=backend.facts.fingerprint,
        model_name=Path(backend.facts.path).name,
        policy=parts.policy.canonical,
        n_ctx_asked=config.n_ctx,
        n_ctx=backend.n_ctx,
        chunk=config.chunk,
        kv_type_k=config.kv_type_k,
        kv_type_v=config.kv_type_v,
        flash_attention=config.flash_attention,
        threads=config.threads,
        cold_budget_tokens=config.cold_budget_tokens,
        capabilities=json.dumps(dataclasses.asdict(backend.capabilities), sort_keys=True),
        content=content,
    )
