"""The results that a report reads, as far as it shows them. Keys that are not named here are let pass: more may come.

Times are in ns, sizes in bytes, contexts in tokens, shares from 0 to 1, log likelihoods in nats a token. None: the
command did not say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvtape.backends.proofs.rows import ProofRow
from kvtape.sim.blocks.sweep import Point

__all__ = [
    "BackendResult",
    "Certification",
    "Curve",
    "Evaluation",
    "EvaluationRow",
    "Fidelity",
    "FidelityCase",
    "FidelityPair",
    "FirstDivergence",
    "Gate",
    "GateRow",
    "Interval",
    "Recorded",
    "Replay",
    "ReplaySession",
    "SimulatedRow",
    "Spread",
    "Tune",
    "Whatif",
]


@dataclass(frozen=True, slots=True)
class Interval:
    """The ends of the middle 95 % of the draws."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SimulatedRow:
    """A point of a what-if or a search. Where `error` says why it cannot be, there are no figures.

    Figures as `sim.whatif.rows.FIGURES`, `intervals` of them where arrivals were drawn. `missed`: conditions of a
    search that do not hold.
    """

    policy: str
    budget: int | None
    slots: int | None
    cold_tokens: int | None
    block: int | None
    clairvoyant: bool
    error: str | None
    turns: int | None
    not_served: int | None
    ttft_p50_ns: int | None
    ttft_p95_ns: int | None
    tpot_p95_ns: int | None
    peak_kv_bytes: int | None
    prefilled_tokens: int | None
    recomputed_tokens: int | None
    forgotten_tokens: int | None
    evicted_tokens: int | None
    retained_mass: float | None
    opt_retained_mass: float | None
    opt_prefilled_tokens: int | None
    intervals: Mapping[str, Interval | None] | None
    pareto: bool = False
    pareto_share: float | None = None
    missed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Recorded:
    """Whether what was recorded, simulated, holds the same tokens after each of `residency_events`."""

    residency_events: int
    equal: bool
    difference: str | None = None


@dataclass(frozen=True, slots=True)
class Whatif:
    """`kvtape whatif --json`, and whatif.json of `kvtape demo`, which also has `recorded` and `notes` (one session).

    `rows`: one a point, with the figures of `sim.whatif.rows.FIGURES`; `seeds`: draws of the arrivals, 1 as recorded.
    """

    rows: tuple[SimulatedRow, ...]
    objectives: Mapping[str, Literal["less", "more"]]
    rules: Mapping[str, str]
    assumed: tuple[str, ...]
    source_digest: str
    costs_digest: str
    config_digest: str
    seeds: int
    seed: int | None
    hypothetical: bool
    recorded: Recorded | None = None
    notes: Whatif | None = None


@dataclass(frozen=True, slots=True)
class Tune:
    """`kvtape tune --json`: `rows` as of a what-if, with what they miss of the conditions `where`."""

    rows: tuple[SimulatedRow, ...]
    rules: Mapping[str, str]
    assumed: tuple[str, ...]
    where: tuple[str, ...]
    feasible: bool
    best: SimulatedRow | None
    nearest: SimulatedRow | None
    commands: Mapping[str, str] | None
    method: str
    choices: int
    trials: tuple[int, ...]
    source_digest: str
    costs_digest: str
    config_digest: str
    seeds: int
    seed: int
    hypothetical: bool
    minimize: str | None = None
    maximize: str | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """`kvtape curve --json`. `measured`: tokens or blocks that were asked for; `ceiling`: that of an endless cache."""

    rules: Mapping[str, Any]
    rows: tuple[Point, ...]
    ceiling: float
    measured: int
    measured_requests: int
    requests: int
    distinct_blocks: int
    block_tokens: int
    source_digest: str
    config_digest: str


@dataclass(frozen=True, slots=True)
class BackendResult:
    """One target of a replay over all sessions, see `replay.report.BackendReport`. KL in nats, against the reference of
    the way.

    `witness_positions` of `residency_events`: after how many of the events that change residency its memory was read;
    `witness_identities` of `witness_rows`: how many rows found there were known for their token by their key.
    """

    name: str
    way: str
    engine_version: str
    kv_types: str
    equal: bool
    residency_equal: bool
    residency_events: int
    witness_positions: int
    witness_rows: int
    witness_identities: int
    not_executed: int
    checkpoints: int
    mean_kl: float | None
    max_kl: float | None
    top1: float | None
    reference: str | None
    reference_reason: str | None


@dataclass(frozen=True, slots=True)
class FirstDivergence:
    """The first thing that differs: where, of which target (`log`: the log contradicts itself), what."""

    session: str
    seq: int
    op: str
    backend: str
    what: str
    expected: Any = None
    found: Any = None
    context: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class ReplaySession:
    """One recorded session of a replay: its events, how many of them fold, where events were lost."""

    session: str
    events: int
    foldable: int
    lost_at: int | None
    numbers: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Replay:
    """`kvtape replay --json`; `tolerances`: the gate of the numbers, `mean_kl` (at most) and `top1` (at least) of each
    session, and `noise_floor_mean_kl`, what correct runs differ by.
    """

    equal: bool
    first_divergence: FirstDivergence | None
    backends: tuple[BackendResult, ...]
    sessions: tuple[ReplaySession, ...]
    notes: tuple[str, ...]
    tolerances: Mapping[str, float]
    log_digest: str
    config_digest: str
    model_fingerprint: str | None
    seed: int | None


@dataclass(frozen=True, slots=True)
class Certification:
    """`kvtape certify --json`."""

    engine: str
    engine_version: str
    machine: str
    rows: tuple[ProofRow, ...]


@dataclass(frozen=True, slots=True)
class GateRow:
    """One optimisation on one workload; `cpu`, `wall`: the share of the time that it saves, None where unmeasured."""

    optimisation: str
    workload: str
    model: str
    engine: str
    engine_version: str
    machine: str
    day: str
    verdict: str
    reason: str | None
    decided_by: str | None = None
    cpu: Mapping[str, float | None] | None = None
    wall: Mapping[str, float | None] | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """`kvtape gate --json`."""

    engine: str
    engine_version: str
    machine: str
    margin: float
    rows: tuple[GateRow, ...]


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """A policy in a task. Needle: `recall` of `n` trials; nll: `nll`, `kl` in nats a token over the `part` of a text;
    batching: `nll` from each of `n_prompts` prompts' first evict on. `absent`: why the policy did not run.
    """

    policy: str
    backend: str | None = None
    budget: int | None = None
    region: str | None = None
    part: str | None = None
    kind: str | None = None
    comparator: str | None = None
    n: int | None = None
    n_prompts: int | None = None
    recall: float | None = None
    recall_low: float | None = None
    recall_high: float | None = None
    nll: float | None = None
    kl: float | None = None
    absent: str | None = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    """`kvtape eval --json` of the tasks needle, nll and batching."""

    task: str
    model: str
    engines: Mapping[str, str]
    config_digest: str
    rules: Mapping[str, str]
    rows: tuple[EvaluationRow, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """Relative errors of `n` things."""

    n: int
    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class FidelityPair:
    """The simulation against both recordings, and one recording against the other."""

    model: Spread
    machine: Spread


@dataclass(frozen=True, slots=True)
class FidelityCase:
    """One recorded log, see `sim.fidelity.Comparison`."""

    residency_events: int
    difference: str | None
    operation: Mapping[str, FidelityPair]
    turn: FidelityPair
    total: FidelityPair
    allowed: float
    holds: bool


@dataclass(frozen=True, slots=True)
class Fidelity:
    """fidelity.json of `make fidelity`: engine, then log."""

    clock: str
    engines: Mapping[str, Mapping[str, FidelityCase]]
