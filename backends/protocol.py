"""What a session needs of an engine, of a clock and of a log.

Positions at this border are **tape positions**, except where a name says `cache`. A backend is told tokens with
every call and keeps its own books: which (tape position, token) stands at which cache position, filled from what
the engine answers, never from the session's fold. It picks the cache position of a new token itself (one past the
largest in use). Comparing those books with the fold is `replay`'s work.

Every backend validates before the engine sees anything (token ids, positions, sizes) and raises
`InputRejected`/`UnsupportedOperation` with its state unchanged. An exception out of the engine is `EngineFault`;
after it the backend refuses everything but `close`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvtape.planner.capabilities import Capabilities
from kvtape.planner.events import Event
from kvtape.planner.layout import Layout
from kvtape.planner.ranges import RangeSet
from kvtape.planner.rows import BlockRow, PlanRow, ScoreRow, SessionRow

__all__ = [
    "AttentionMass",
    "Backend",
    "Choose",
    "Clairvoyant",
    "Clock",
    "Computed",
    "DecodeRun",
    "Engine",
    "EventSink",
    "FlashAttention",
    "KvRows",
    "Logits",
    "ModelFacts",
    "SessionConfig",
    "Witness",
]

FlashAttention = Literal["off", "on", "auto"]
"""Attention without its weights in memory. `auto`: what the engine decides, which an open session's config says."""

Logits = npt.NDArray[np.float32]
Choose = Callable[[Logits], int | None]
"""Next token from float32 logits `[n_vocab]`; None ends the run without decoding."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a loaded model is. `fingerprint` is `capacity.model.fingerprint` of the file."""

    path: str
    fingerprint: str
    arch: str
    n_vocab: int
    n_ctx_train: int
    end_tokens: frozenset[int]


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """What is asked when a session opens; sizes in tokens. An engine may pad, never silently change, any of it."""

    n_ctx: int = 1024
    chunk: int = 512
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    flash_attention: FlashAttention = "off"
    threads: int = 1
    cold_budget_tokens: int = 0
    cold_budget_bytes: int = 0
    """Of the exported blocks, beside the tokens; 0 for no bound of its own."""
    uncertified: bool = False
    """Open a precision that no passing row certifies (`backends.proofs`). The session says that it did."""
    options: dict[str, str] = field(default_factory=dict)
    """Engine options from the spec `NAME:key=value,...`; an unknown key is a UsageError that lists the known."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Result of a prefill, rebuild or refill: logits of its last token, engine calls made, tokens computed.

    `counted`: whether the engine itself confirms that count; else it is what it was given, a fallback.
    """

    logits: Logits
    calls: int
    tokens: int
    counted: bool = True


@dataclass(frozen=True, slots=True)
class DecodeRun:
    """Tokens that were decoded, logits after the last, and why the run ended; `counted` as in `Computed`."""

    tokens: tuple[int, ...]
    logits: Logits
    calls: int
    stopped: Literal["n", "limit", "chosen_none"]
    counted: bool = True


@dataclass(frozen=True, slots=True)
class KvRows:
    """Per layer `[n_rows, n_kv_heads * head_dim]`, storage order; layers may differ in row count when faulty."""

    keys: tuple[npt.NDArray[Any], ...]
    values: tuple[npt.NDArray[Any], ...]


@dataclass(frozen=True, slots=True)
class Witness:
    """What the engine's own memory holds now, every pending shift applied first.

    `cache_positions` int64 `[n_rows]`: of each row, storage order. `positions_from` says whether the engine
    stores them (`engine`) or they are the backend's books (`books`; then only the rotation of layer 0 proves
    them). `rows`: post-RoPE keys and values as stored. `mirror`: what the host copy says the rows should be,
    where the backend has one.
    """

    cache_positions: npt.NDArray[np.int64]
    positions_from: Literal["engine", "books"]
    rows: KvRows
    mirror: KvRows | None = None


@dataclass(frozen=True, slots=True)
class AttentionMass:
    """Attention that queries paid to resident rows, by tape position.

    `tape_positions` int64 `[n_rows]`, ascending. `layers`: model layers, ascending. `mass` float32
    `[n_layers, n_rows]`: summed over query heads and queries. `peak` float32 `[n_layers, n_rows]`: the largest
    head's sum over queries. A layer's whole mass is `n_heads * n_queries`, less what the queries paid to rows that
    are not resident now (their own, for a probe).
    """

    tape_positions: npt.NDArray[np.int64]
    layers: tuple[int, ...]
    n_queries: int
    mass: npt.NDArray[np.float32]
    peak: npt.NDArray[np.float32]


class Backend(Protocol):
    """One native context. `facts` of the model; `n_ctx` is the effective context in tokens."""

    name: str
    engine_version: str
    facts: ModelFacts
    config: SessionConfig
    n_ctx: int
    capabilities: Capabilities

    def refusal(self, operation: str) -> str | None:
        """Why a capability is false ('remove_middle', 'position_shift', ...); None where it is true."""

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Computed:
        """Compute `tokens` behind the last row, in pieces of at most `config.chunk`."""

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        """Up to `n` tokens, one engine call each, while fewer than `limit` rows are resident.

        `choose(logits)` gives each token, first from the `logits` handed in.
        """

    def truncate(self, tape_stop: int) -> None:
        """Remove every row at or past `tape_stop`. Needs remove_tail (remove_middle when rows are out of order)."""

    def evict(self, start: int, stop: int) -> None:
        """Remove the rows of `[start, stop)`, one run in tape and cache; the others keep their positions."""

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        """Move the rows at these cache positions by `delta`, keys re-rotated. Needs position_shift."""

    def export_block(self, start: int, stop: int) -> bytes:
        """The rows of `[start, stop)` in an envelope (`backends.envelope`). Needs cold_store."""

    def admit(self, block: bytes, start: int, cache_start: int) -> None:
        """Put exported rows back at these tape and cache positions; rotates when the cache position differs.

        Raises StateRejected when the envelope is damaged or belongs to another model, layout or KV type.
        """

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Computed:
        """Compute evicted tokens again into a free place, attending to the rows before it. Needs recompute_range."""

    def rebuild(self, ranges: RangeSet, tokens: Sequence[int]) -> Computed:
        """Clear the cache and prefill `tokens`, the survivors `ranges` in tape order, at positions 0..n-1.

        No survivors just clear it: logits `[0]`, no calls.
        """

    def snapshot(self) -> bytes:
        """The whole state in an envelope. Needs snapshot_state."""

    def restore(self, snapshot: bytes) -> None:
        """Put a snapshot of this session's model and configuration back. StateRejected changes nothing."""

    def score(self, tokens: Sequence[int], tape_start: int, layers: Sequence[int] | None = None) -> AttentionMass:
        """Compute `tokens` as if they stood at `tape_start`, and say what their queries attended to.

        `tape_start` at the tape's end is a probe. Below it, `tokens` are what stands there (the last window): they
        are computed again over the rows before them. Only rows before `tape_start` are scored. Nothing remains:
        books, memory and later logits are as if it had not been called. `layers` None: all. Needs attention_scores.
        """

    def take_mass(self) -> AttentionMass:
        """What every query computed since the last call paid to the rows that are resident now; all layers.

        Needs attention_scores: the option `scores=on`, which accumulates while computing.
        """

    def books(self) -> Layout:
        """The backend's own account of its rows."""

    def witness(self) -> Witness:
        """Read the engine's memory. Never changes what later operations compute."""

    def kv_bytes(self) -> dict[str, int]:
        """Bytes: `resident` (rows in use) and `allocated` (what the engine holds for the cache)."""

    def cancel(self) -> None:
        """Ask the running or next operation to stop (from any thread); it raises Cancelled at its start state."""

    def close(self) -> None:
        """Free the native context. Idempotent."""


@runtime_checkable
class Clairvoyant(Protocol):
    """What a backend can do beside the others whose session's future is known, because it is a recording."""

    def later_mass(self) -> AttentionMass:
        """What all queries that are still to come will pay to the rows that are resident now; all layers."""


class Engine(Protocol):
    """A loaded model that opens sessions."""

    name: str
    version: str
    facts: ModelFacts

    def tokenize(self, text: str) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str: ...

    def open(self, config: SessionConfig) -> Backend: ...

    def close(self) -> None: ...


class Clock(Protocol):
    """Integer nanoseconds; injected, so that a run can be repeated."""

    def now_ns(self) -> int: ...


class EventSink(Protocol):
    """Where a session writes. `record` does not wait for the disk while there is room."""

    def open_session(self, row: SessionRow) -> None: ...

    def record(
        self,
        event: Event,
        *,
        tokens: Sequence[int] | None = None,
        plan: PlanRow | None = None,
        blocks: Sequence[BlockRow] = (),
        scores: Sequence[ScoreRow] = (),
    ) -> None:
        """`tokens` are those that the event put on the tape or computed again; stored only with content on.

        `plan` belongs to a plan event, `scores` (one row per block) to a score event.
        """

    def flush(self) -> int:
        """Return once everything recorded so far is durable; the number of acknowledged events."""
