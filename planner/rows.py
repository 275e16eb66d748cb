"""The rows beside the events: runs, sessions, blocks, plans, scores, tokens, trials, proofs. One field table each."""

from __future__ import annotations

from dataclasses import dataclass

from kvtape.planner.fields import Field

__all__ = [
    "BLOCK_FIELDS",
    "CERTIFICATION_FIELDS",
    "PLAN_FIELDS",
    "RUN_FIELDS",
    "SCORE_FIELDS",
    "SESSION_FIELDS",
    "TOKENS_FIELDS",
    "TRIAL_FIELDS",
    "BlockRow",
    "CertificationRow",
    "PlanRow",
    "RunRow",
    "ScoreRow",
    "SessionRow",
    "TokensRow",
    "TrialRow",
]

RUN_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run", nullable=False, logical=False),
    Field("kind", "text", "live, replay, simulation or import", nullable=False),
    Field("config_digest", "text", "SHA-256 hex over the canonical JSON of the run's configuration", nullable=False),
    Field("config", "json", "that configuration", nullable=False),
    Field("seed", "u64", "seed of every draw; NULL where nothing is drawn"),
    Field("kvtape_version", "text", "version that wrote the run", nullable=False, logical=False),
    Field("engine_versions", "json", "{engine: version}", nullable=False, logical=False),
    Field("started_at_ns", "u64", "nanoseconds on the injected clock", nullable=False, logical=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    run_id: str
    kind: str
    config_digest: str
    config: str
    seed: int | None = None
    kvtape_version: str
    engine_versions: str
    started_at_ns: int


# What the source of an imported session does not say is NULL.
SESSION_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run", nullable=False, logical=False),
    Field("session_id", "text", "unique within the run", nullable=False),
    Field("backend", "text", "llama, openvino, reference or modelled; of an import its format", nullable=False),
    Field("engine_version", "text", "version of the engine", logical=False),
    Field("model_fingerprint", "text", "see capacity.model.fingerprint"),
    Field("model_name", "text", "file name of the model, without its folder", logical=False),
    Field("policy", "text", "policy spec, canonical form"),
    Field("n_ctx_asked", "u64", "context asked for, tokens"),
    Field("n_ctx", "u64", "effective context, tokens: even, and padded as the engine pads"),
    Field("chunk", "u64", "tokens per physical prefill call"),
    Field("kv_type_k", "text", "storage type of the keys"),
    Field("kv_type_v", "text", "storage type of the values"),
    Field("flash_attention", "bool", "whether flash attention ran"),
    Field("threads", "u64", "engine threads"),
    Field("cold_budget_tokens", "u64", "cold store budget, tokens; 0 for no store"),
    Field("cold_budget_bytes", "u64", "cold store budget, bytes; 0 for no bound beside the tokens"),
    Field("capabilities", "json", "the whole capability struct"),
    Field("content", "bool", "whether token content is stored", nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    run_id: str
    session_id: str
    backend: str
    engine_version: str | None = None
    model_fingerprint: str | None = None
    model_name: str | None = None
    policy: str | None = None
    n_ctx_asked: int | None = None
    n_ctx: int | None = None
    chunk: int | None = None
    kv_type_k: str | None = None
    kv_type_v: str | None = None
    flash_attention: bool | None = None
    threads: int | None = None
    cold_budget_tokens: int | None = None
    cold_budget_bytes: int | None = 0
    capabilities: str | None = None
    content: bool


BLOCK_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run", nullable=False, logical=False),
    Field("session_id", "text", "the session", nullable=False),
    Field("seq", "u64", "the event that gave the block its range", nullable=False),
    Field("block_id", "u64", "unique within the session, never used again", nullable=False),
    Field("generation", "u64", "tape generation the range belongs to", nullable=False),
    Field("start", "u64", "first tape position", nullable=False),
    Field("stop", "u64", "one past the last tape position", nullable=False),
    Field("segment", "text", "kind of the segment: system, tools, user, assistant, ...", nullable=False),
    Field("cache_class", "text", "task_pinned, repo_map or volatile", nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRow:
    run_id: str
    session_id: str
    seq: int
    block_id: int
    generation: int
    start: int
    stop: int
    segment: str
    cache_class: str


PLAN_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run", nullable=False, logical=False),
    Field("session_id", "text", "the session", nullable=False),
    Field("seq", "u64", "the plan event", nullable=False),
    Field("policy", "text", "policy spec, canonical form", nullable=False),
    Field("trigger", "text", "what passed which limit: n_ctx or budget", nullable=False),
    Field("limit_tokens", "u64", "that limit", nullable=False),
    Field("incoming_tokens", "u64", "tokens about to be computed", nullable=False),
    Field("budget_tokens", "u64", "tokens the plan may keep", nullable=False),
    Field("total_tokens", "u64", "resident tokens before", nullable=False),
    Field("hot_tokens", "u64", "tokens kept", nullable=False),
    Field("protected_tokens", "u64", "tokens that no plan may evict", nullable=False),
    Field("overshoot_tokens", "u64", "tokens evicted beyond what the budget asked", nullable=False),
    Field("over_budget", "bool", "whether what is kept exceeds the budget", nullable=False),
    Field("keep", "json", "[[start, stop], ...]", nullable=False),
    Field("evict", "json", "[[block_id, start, stop], ...]", nullable=False),
    Field("diagnostics", "json", "[text, ...]", nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    run_id: str
    session_id: str
    seq: int
    policy: str
    trigger: str
    limit_tokens: int
    incoming_tokens: int
    budget_tokens: int
    total_tokens: int
    hot_tokens: int
    protected_tokens: int
    overshoot_tokens: int
    over_budget: bool
    keep: str
    evict: str
    diagnostics: str


TOKENS_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run", nullable=False, logical=False),
    Field("session_id", "text", "the session", nullable=False),
    Field(
        "seq",
        "u64",
        "the prefill, decode or recompute event that put them there; of an imported request its prompt or generate",
        nullable=False,
    ),
    Field("start", "u64", "tape position of the first token", nullable=False),
    Field("n_tokens", "u64", "how many", nullable=False),
    Field("block_tokens", "u64", "tokens that one hash stands for: 32, or the block of an import", nullable=False),
    Field(
        "hashes",
        "json",
        "keyed hash chain, hex: one per full 32-token block of the tape, one for the tail; or an import's block ids",
        nullable=False,
        logical=False,
    ),
    Field("mac", "text", "keyed hash of start and token ids, hex; NULL where no ids are known", logical=False),
    Field("tokens", "tokens", "the token ids; NULL unless the session records content", chained=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensRow:
    run_id: str
    session_id: str
    seq: int
    start: int
    n_tokens: int
    block_tokens: int
    hashes: str
    mac: str | None
    tokens: tuple[int, ...] | None


SCORE_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run", nullable=False, logical=False),
    Field("session_id", "text", "the session", nullable=False),
    Field("seq", "u64", "the score event; its detail names the layers and counts the queries", nullable=False),
    Field(
        "block_id",
        "u64",
        "a block that was resident when it was measured; of reason `dense` any, the first in parts",
        nullable=False,
    ),
    Field("generation", "u64", "tape generation the range belongs to", nullable=False),
    Field("start", "u64", "first tape position", nullable=False),
    Field("stop", "u64", "one past the last tape position", nullable=False),
    Field(
        "mass",
        "floats",
        "per layer: attention summed over query heads, queries and the block's tokens",
        nullable=False,
        logical=False,
    ),
    Field(
        "peak",
        "floats",
        "per layer: for each token the largest head's sum over queries, summed over the block's tokens",
        nullable=False,
        logical=False,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRow:
    run_id: str
    session_id: str
    seq: int
    block_id: int
    generation: int
    start: int
    stop: int
    mass: tuple[float, ...]
    peak: tuple[float, ...]


TRIAL_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run", nullable=False, logical=False),
    Field("trial", "u64", "unique within the run", nullable=False),
    Field("session_id", "text", "the session it ran in", nullable=False),
    Field("task", "text", "what was asked: needle, nll, ...", nullable=False),
    Field("policy", "text", "policy spec, canonical form", nullable=False),
    Field("budget_tokens", "u64", "tokens the policy may keep; NULL where there is no budget"),
    Field("seed", "u64", "seed of the trial's draws"),
    Field("region", "text", "where the needle stood: sink, middle or recent"),
    Field("start", "u64", "first tape position of the needle, or of the tokens that were measured"),
    Field("stop", "u64", "one past the last"),
    Field("expected", "text", "the answer that counts as correct", chained=False),
    Field("answer", "text", "the answer that came", logical=False, chained=False),
    Field("correct", "bool", "whether it was the expected one", logical=False),
    Field("nll", "f64", "mean negative log likelihood, nats a token", logical=False),
    Field("kl", "f64", "mean KL divergence from dense attention, nats a token", logical=False),
    Field("n_tokens", "u64", "tokens that were measured or generated", nullable=False),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    run_id: str
    trial: int
    session_id: str
    task: str
    policy: str
    budget_tokens: int | None = None
    seed: int | None = None
    region: str | None = None
    start: int | None = None
    stop: int | None = None
    expected: str | None = None
    answer: str | None = None
    correct: bool | None = None
    nll: float | None = None
    kl: float | None = None
    n_tokens: int


CERTIFICATION_FIELDS: tuple[Field, ...] = (
    Field("run_id", "text", "the run", nullable=False, logical=False, since=2),
    Field("certification", "u64", "number of the measure, unique within the run", nullable=False, since=2),
    Field("kind", "text", "certification (of a precision) or gate (of an optimisation)", nullable=False, since=2),
    Field("model", "text", "file name of the model, without its folder", nullable=False, logical=False, since=2),
    Field("fingerprint", "text", "see capacity.model.fingerprint", nullable=False, since=2),
    Field("engine", "text", "llama, openvino, ...", nullable=False, since=2),
    Field("engine_version", "text", "version of the engine", nullable=False, logical=False, since=2),
    Field("machine", "text", "class of the machine", nullable=False, logical=False, since=2),
    Field("day", "text", "when it was measured, YYYY-MM-DD, UTC", nullable=False, logical=False, since=2),
    Field("subject", "text", "what was measured: a knob or a cell, as canonical text", nullable=False, since=2),
    Field("settings", "text", "what the measures depend on beside that", nullable=False, since=2),
    Field(
        "ability", "text", "what it speaks of: quality, capacity, shift, ...; NULL for the subject as a whole", since=2
    ),
    Field("measure", "text", "name of the number; NULL for the subject as a whole", since=2),
    Field("value", "f64", "what came of it; NULL where nothing could be measured", logical=False, since=2),
    Field("low", "f64", "lower end of its 95 % interval, where there is one", logical=False, since=2),
    Field("high", "f64", "upper end", logical=False, since=2),
    Field("unit", "text", "unit of value, interval and threshold", since=2),
    Field("bound", "text", "most, least or equal: on which side of the threshold it passes", since=2),
    Field("threshold", "f64", "what it was held to; NULL where it is told and judged by nothing", since=2),
    Field("verdict", "text", "pass, fail or refused", nullable=False, logical=False, since=2),
    Field("reason", "text", "why, where the numbers do not say", logical=False, since=2),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificationRow:
    run_id: str
    certification: int
    kind: str
    model: str
    fingerprint: str
    engine: str
    engine_version: str
    machine: str
    day: str
    subject: str
    settings: str
    ability: str | None = None
    measure: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str | None = None
    bound: str | None = None
    threshold: float | None = None
    verdict: str
    reason: str | None = None
