"""The shadow pass: a dense context beside a session, which measures what every query attends to over the whole tape.

It follows the session's tape after each call and writes what it measured among the session's own events, as scores of
reason `dense`. The session knows nothing of it: its policy, its cache and its clock (`StoppableClock`) are untouched.
"""

from __future__ import annotations

import json
import sys
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np

from kvtape.backends.clock import StoppableClock
from kvtape.backends.errors import Cancelled, ContextOverflow, UnsupportedOperation, UsageError
from kvtape.backends.parts import Parts
from kvtape.backends.protocol import AttentionMass, Backend, Engine, SessionConfig
from kvtape.backends.scoring import finite, score_rows
from kvtape.planner.blocks import DEFAULT_BLOCK, Block
from kvtape.planner.events import Op
from kvtape.planner.scores import DENSE
from kvtape.traces.errors import LogWriteFailed

__all__ = ["DEFAULT_EVERY", "Shadow", "open_shadow"]

_SINKS: Final = (1, 2, 4, 8, 16, 32)
"""Tape positions at which keys are measured apart, wherever the blocks have their borders."""

DEFAULT_EVERY = DEFAULT_BLOCK
"""Queries that are measured together, unless asked otherwise: as many as a block of the planner has tokens."""

_NO_CUT = sys.maxsize


def open_shadow(
    engine: Engine, config: SessionConfig, clock: StoppableClock, *, tokens: int, every: int = DEFAULT_EVERY
) -> Shadow:
    """A shadow for a session that `engine` opens with `config`, with room for a tape of `tokens`.

    It runs without flash attention, which never has the weights in memory, and keeps values that need it as f16.
    Raises UsageError when that is more than the model was trained for, when the session's memory is bounded (the
    shadow's cache would be beside it), or for an `every` below 1; UnsupportedOperation where the engine gives no
    attention of this model.
    """
    if every < 1:
        raise UsageError(f"a score every {every} queries: give at least 1")
    trained = engine.facts.n_ctx_train
    if tokens > trained:
        raise UsageError(
            f"dense attention over a tape of up to {tokens} tokens: the model was trained on {trained}, and a dense "
            f"pass cannot go past that; give a shorter text, or generate less"
        )
    if config.options.get("memory", "off") != "off":
        raise UsageError("memory= bounds one cache, and dense attention needs a second one; give --n-ctx instead")
    # OpenVINO scores from its copy of the keys, which a session may be opened without.
    wanted = {"scores": "on"} | ({"mirror": "on"} if engine.name == "openvino" else {})
    backend = engine.open(
        replace(
            config,
            n_ctx=max(2, tokens),
            kv_type_v=_values(config),
            flash_attention="off",
            cold_budget_tokens=0,
            cold_budget_bytes=0,
            options=config.options | wanted,
        )
    )
    if not backend.capabilities.attention_scores:
        why = backend.refusal("attention_scores") or "no attention_scores"
        backend.close()
        raise UnsupportedOperation("dense attention", f"{why}; leave out --score-all")
    return Shadow(backend, clock, every)


def _values(config: SessionConfig) -> str:
    needs_flash = config.flash_attention != "off" and config.kv_type_v not in ("bf16", "f16", "f32")
    return "f16" if needs_flash else config.kv_type_v


class Shadow:
    """One session's shadow. `backend`: open, empty, with attention_scores; closed with the session.

    `clock` is the session's own, and stands still while the shadow computes. Whatever goes wrong here ends the
    measuring, never the session: a `refuse` event says so once, and `given_up` says why.
    """

    def __init__(self, backend: Backend, clock: StoppableClock, every: int = DEFAULT_EVERY) -> None:
        self.clock = clock
        self.given_up: str | None = None
        self.behind = False
        """Whether it was cancelled before it had caught up; after the session's next call it goes on."""
        self._backend = backend
        self._every = every
        self._tape: list[int] = []
        self._borders = [0]
        self._cut = _NO_CUT
        self._running = False

    def follow(self, parts: Parts, *, computed: bool = True) -> None:
        """Measure what the session's tape has that was not measured, each piece an event. Raises LogWriteFailed.

        `computed`: whether the call before was one that computes what it puts on the tape; a restore is not.
        """
        self._cut = min(self._cut, parts.shortest)
        parts.shortest = len(parts.tape)
        if self.given_up is not None:
            return
        self.behind = self._running = True
        try:
            with self.clock.stopped():
                self._catch_up(parts, computed)
            self.behind = False
        except LogWriteFailed:
            raise
        except Cancelled:
            pass
        except Exception as err:
            self._give_up(parts, err)
        finally:
            self._running = False

    def cancel(self) -> None:
        """Stop it if it computes now: what it lacks is measured after the session's next call."""
        if self._running:
            self._backend.cancel()

    def close(self) -> None:
        """Free its context. Idempotent."""
        self._backend.close()

    def _give_up(self, parts: Parts, err: Exception) -> None:
        self.given_up, self.behind = str(err), False
        self._backend.close()
        parts.journal.emit(Op.REFUSE, parts.now(), error_class=type(err).__name__, reason=f"{DENSE}: {err}")

    def _catch_up(self, parts: Parts, computed: bool) -> None:
        tape = parts.tape
        if len(tape) > self._backend.n_ctx:
            raise ContextOverflow(len(tape), self._backend.n_ctx, "the shadow was opened for a shorter tape")
        kept = min(self._cut, _common(self._tape, tape))
        self._return_to(kept)
        self._cut = _NO_CUT
        blocks = parts.catalog.blocks()
        stops = [b.stop for b in blocks]
        # A piece that the cut went through is measured again up to there: its sums had in them what is gone.
        for start, stop in _pieces(len(self._tape), kept, stops, self._every):
            self._measure(parts, start, stop, blocks, repeated=True)
        for start, stop in _pieces(kept, len(tape), stops, self._every):
            self._measure(parts, start, stop, blocks, repeated=not computed)

    def _return_to(self, tape_length: int) -> None:
        """Back to the last border of pieces at or before `tape_length`; to the beginning where the engine cannot."""
        del self._borders[bisect_right(self._borders, tape_length) :]
        if self._borders[-1] == len(self._tape):
            return
        try:
            self._backend.truncate(self._borders[-1])
        except UnsupportedOperation:  # a windowed cache has overwritten rows that would be seen again
            self._backend.truncate(0)
            self._borders = [0]
        del self._tape[self._borders[-1] :]

    def _measure(self, parts: Parts, start: int, stop: int, blocks: Sequence[Block], *, repeated: bool) -> None:
        queries = parts.tape[start:stop]
        self._backend.prefill(queries, start)
        self._tape += queries
        self._borders.append(stop)
        measured = finite(self._backend.take_mass())
        _check(measured, start, stop)
        detail = {"layers": list(measured.layers), "queries": stop - start}
        parts.journal.emit(
            Op.SCORE,
            parts.now(),
            start=start,
            stop=stop,
            n_tokens=stop,
            reason=DENSE,
            detail=json.dumps(detail | ({"repeated": True} if repeated else {})),
            score_rows=score_rows(parts, measured, _up_to(blocks, stop)),
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two tapes have in common from the beginning on."""
    differ = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _pieces(start: int, stop: int, block_stops: Sequence[int], every: int) -> Iterator[tuple[int, int]]:
    """`[start, stop)` in pieces of at most `every` queries, each cut at the last end of a block in it, if there is one.

    Pieces and blocks then have borders in common, also where segments are no multiple of a block long.
    """
    while start < stop:
        end = min(start + every, stop)
        i = bisect_right(block_stops, end) - 1
        if i >= 0 and block_stops[i] > start:
            end = block_stops[i]
        yield start, end
        start = end


def _up_to(blocks: Sequence[Block], stop: int) -> list[Block]:
    """The blocks of the tape before `stop`, the last one as far as it reaches, the first tokens in parts that double.

    Sinks are a few tokens, and most attention is theirs: in one sum with the rest of their block nobody could say
    what a policy that keeps just them retains.
    """
    there: list[Block] = []
    for block in blocks:
        end = min(block.stop, stop)
        borders = [block.start, *(n for n in _SINKS if block.start < n < end), end]
        there += [replace(block, start=a, stop=b) for a, b in pairwise(borders) if a < b]
        if end == stop:
            break
    return there


def _check(measured: AttentionMass, start: int, stop: int) -> None:
    if measured.n_queries != stop - start or not np.array_equal(measured.tape_positions, np.arange(stop)):
        raise UnsupportedOperation(
            "dense attention",
            f"the engine measured {measured.n_queries} queries over {len(measured.tape_positions)} rows, not "
            f"{stop - start} over {stop}",
        )
