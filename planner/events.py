"""The events of a session: what was asked, what was decided, what was executed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvtape.planner.fields import Field

__all__ = ["EVENT_FIELDS", "SCHEMA_VERSION", "BlockRef", "Event", "Op", "Placement", "Way"]

SCHEMA_VERSION = 2


class Op(StrEnum):
    """Workload first, then observations, then decisions and their effects."""

    OPEN = "open"
    PROMPT = "prompt"
    GENERATE = "generate"
    TRUNCATE = "truncate"
    CLOSE = "close"
    SCORE = "score"
    PLAN = "plan"
    PREFILL = "prefill"
    DECODE = "decode"
    EVICT = "evict"
    ADMIT = "admit"
    SHIFT = "shift"
    RECOMPUTE = "recompute"
    TRIM = "trim"
    SNAPSHOT = "snapshot"
    RESTORE = "restore"
    REFUSE = "refuse"
    LOST = "lost"
    FATAL = "fatal"


class Way(StrEnum):
    """How an effect was carried out: same retained set, other positions, arithmetic and cost."""

    GAP = "gap"
    REBASED = "rebased"
    RECOMPUTE = "recompute"
    IMPORT = "import"
    MODELLED = "modelled"


class Placement(StrEnum):
    IN_PLACE = "in_place"
    APPEND = "append"


@dataclass(frozen=True, slots=True)
class BlockRef:
    """A block as an event names it: its id and its tape range."""

    block_id: int
    start: int
    stop: int


EVENT_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run this row belongs to", nullable=False, logical=False),
    Field("session_id", "text", "the session, unique within the run", nullable=False),
    Field("seq", "u64", "0-based and gapless per run and session", nullable=False),
    Field("at_ns", "u64", "nanoseconds on the injected clock when the operation began", nullable=False, logical=False),
    Field("op", "op", "what happened", nullable=False),
    Field("turn", "u64", "1-based turn; 0 before the first prompt", nullable=False),
    Field("generation", "u64", "tape generation after the event", nullable=False),
    Field("start", "u64", "first tape position (for shift: first cache position)"),
    Field("stop", "u64", "one past the last tape position (for shift: cache position)"),
    Field("n_tokens", "u64", "tokens the event is about; for open, the effective n_ctx"),
    Field("cache_start", "u64", "cache position of the first token; rows follow contiguously"),
    Field("delta", "i64", "shift: added to the cache positions of the moved rows"),
    Field("block_id", "u64", "the block that was admitted or trimmed"),
    Field("snapshot_id", "u64", "the snapshot that was taken or restored"),
    Field("way", "way", "how it was carried out"),
    Field("placement", "placement", "admit: in_place or append"),
    Field("cold", "bool", "evict: the blocks went to the cold store"),
    Field("blocks", "json", "evict: [[block_id, start, stop], ...] of the blocks in the range"),
    Field("elapsed_ns", "u64", "nanoseconds the operation took on the injected clock", logical=False),
    Field("resident_tokens", "u64", "tokens resident after the event"),
    Field("resident_digest", "u64", "digest of the resident tape ranges after the event"),
    Field("layout_digest", "u64", "digest of (tape_start, length, cache_start) in cache order after the event"),
    Field("kv_bytes", "u64", "bytes of the resident rows in the engine", logical=False),
    Field("reused", "u64", "turn: resident tokens below the common prefix"),
    Field("forgotten", "u64", "turn: evicted and not re-admitted tokens below the common prefix"),
    Field("prefilled", "u64", "turn: prefix tokens past the common prefix"),
    Field("dropped", "u64", "turn: resident tokens given up by the truncation"),
    Field("suffix", "u64", "turn: suffix tokens"),
    Field("prompt_tokens", "u64", "turn: tokens offered"),
    Field("completion_tokens", "u64", "decode: tokens generated in this run"),
    Field("token_count_source", "text", "engine or fallback"),
    Field("physical_prefill_calls", "u64", "engine calls made for this prefill or rebuild"),
    Field("physical_prefill_tokens", "u64", "tokens the engine computed for this prefill or rebuild"),
    Field("deferred_prefill_calls", "u64", "prefills folded into a later decode call"),
    Field("deferred_prefill_tokens", "u64", "tokens of those prefills"),
    Field("decode_calls", "u64", "decode: engine calls"),
    Field(
        "drafted_tokens", "u64", "decode: proposed tokens that the engine looked at; NULL without speculation", since=2
    ),
    Field("accepted_tokens", "u64", "decode: of those, the ones that it generates itself", since=2),
    Field("rejected_tokens", "u64", "decode: of those, the others; their rows were removed", since=2),
    Field("recomputed_tokens", "u64", "tokens computed again that had been resident before"),
    Field("reason", "text", "why: typed short text (plan trigger, stop rule, cause of a fatal, ...)"),
    Field("error_class", "text", "refuse, fatal: the class of the error"),
    Field("detail", "json", "what has no column, as a JSON object"),
    Field("schema_version", "u64", "version of this row's shape", nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One immutable row of the log; `EVENT_FIELDS` documents each attribute and its unit."""

    run_id: str
    session_id: str
    seq: int
    at_ns: int
    op: Op
    turn: int
    generation: int
    start: int | None = None
    stop: int | None = None
    n_tokens: int | None = None
    cache_start: int | None = None
    delta: int | None = None
    block_id: int | None = None
    snapshot_id: int | None = None
    way: Way | None = None
    placement: Placement | None = None
    cold: bool | None = None
    blocks: tuple[BlockRef, ...] | None = None
    elapsed_ns: int | None = None
    resident_tokens: int | None = None
    resident_digest: int | None = None
    layout_digest: int | None = None
    kv_bytes: int | None = None
    reused: int | None = None
    forgotten: int | None = None
    prefilled: int | None = None
    dropped: int | None = None
    suffix: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    token_count_source: str | None = None
    physical_prefill_calls: int | None = None
    physical_prefill_tokens: int | None = None
    deferred_prefill_calls: int | None = None
    deferred_prefill_tokens: int | None = None
    decode_calls: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    rejected_tokens: int | None = None
    recomputed_tokens: int | None = None
    reason: str | None = None
    error_class: str | None = None
    detail: str | None = None
    schema_version: int = SCHEMA_VERSION
