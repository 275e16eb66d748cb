"""What a KV engine is: `KvEngine`, its sibling `RetrievalEngine`, and the small types that they report in.

The caller owns the loop, the tokeniser and the sampling; weights and the feed-forward router come with every call.

    engine = make_engine(parse_engine("standard:window=64"))
    hidden = engine.prefill(weights, LocalFfn(weights), prompt)
    while ...: hidden = engine.decode_step(weights, ffn, choose(logits_of(weights, hidden)[0]))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, Protocol, runtime_checkable

from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.weights import Weights

__all__ = ["Contract", "EngineInfo", "KvEngine", "Memory", "MemoryKind", "RetrievalEngine", "StateHandle", "StateMask"]


class Contract(StrEnum):
    """What an engine promises of its logits, measured against `standard` without a window.

    EXACT: bit-identical. EXACT_IN_WINDOW: bit-identical while the context is within the window. BOUNDED_KL: a mean KL
    below a stated bound. CODEC_BOUNDED: rows decode to within a stated cosine. TASK: judged by answers alone.
    """

    EXACT = "exact"
    EXACT_IN_WINDOW = "exact in window"
    BOUNDED_KL = "bounded KL"
    CODEC_BOUNDED = "codec bounded"
    TASK = "task"

    @property
    def promise(self) -> str:
        """The same for people who choose an engine."""
        return _PROMISES[self]


_PROMISES: Final = {
    Contract.EXACT: "logits are those of standard to the bit, at every step",
    Contract.EXACT_IN_WINDOW: "logits are those of standard to the bit while the context is within the window",
    Contract.BOUNDED_KL: "the mean KL from standard over the steps behind a prompt stays below a stated bound",
    Contract.CODEC_BOUNDED: "rows are read back with at least a stated mean cosine; how far logits move is measured",
    Contract.TASK: "judged by its answers; logits may be any distance from those of standard",
}


class StateMask(StrEnum):
    """How much of a step an engine keeps for whoever asks: everything, the layers' input rows alone, nothing."""

    FULL = "full"
    H_ONLY = "h-only"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """`spec`: canonical text, from which the same engine is made again. `quadratic`: a step costs the whole context.

    `bound`: under BOUNDED_KL the largest mean KL, in nats, under CODEC_BOUNDED the smallest mean cosine; None where the
    options have no stated one.
    """

    name: str
    spec: str
    contract: Contract
    quadratic: bool = False
    experimental: bool = False
    bench_only: bool = False
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryKind:
    """Bytes of one kind of state (`kv`, `residual`, `codes`, `tokens`, ...).

    `cold`: of what left the window, whether or not a step still reads it.
    """

    kind: str
    occupied: int
    allocated: int
    cold: bool = False


@dataclass(frozen=True, slots=True)
class Memory:
    """Reachability, occupancy and capacity, kept apart.

    `reachable_tokens`: how many tokens the last query could attend to. `rows`: token rows held in each layer, in
    whatever form. Occupied bytes are those of rows held, allocated bytes those that the process has for them.
    """

    reachable_tokens: int
    rows: int
    kinds: tuple[MemoryKind, ...]

    @property
    def occupied_bytes(self) -> int:
        return sum(kind.occupied for kind in self.kinds)

    @property
    def allocated_bytes(self) -> int:
        return sum(kind.allocated for kind in self.kinds)

    @property
    def cold_bytes(self) -> int:
        return sum(kind.occupied for kind in self.kinds if kind.cold)


@dataclass(frozen=True, slots=True)
class StateHandle:
    """Where the rows of a session live: in this process, or at a server that `where` names."""

    spec: str
    n_tokens: int
    place: Literal["local", "remote"] = "local"
    where: str = ""


@runtime_checkable
class KvEngine(Protocol):
    """One session at a time. A call that raises leaves the state of before it, or says StateInvalidated."""

    @property
    def info(self) -> EngineInfo: ...

    def prefill(self, weights: Weights, ffn: FfnRouter, tokens: Sequence[int]) -> Floats:
        """Begin anew with `tokens`: the last row `[1, n_embd]` behind the last layer.

        Raises EmptyPrompt, InputRejected, ExecutionRefused, and what `ffn` raises.
        """

    def decode_step(self, weights: Weights, ffn: FfnRouter, token: int) -> Floats:
        """The same for one more token. The weights are those of the prefill; the router may be another.

        After an error of the router the identical token may be tried again. Raises EmptyPrompt before a prefill,
        StateInvalidated after a step that could not be taken back.
        """

    def memory(self) -> Memory: ...

    @property
    def window_tokens(self) -> int | None:
        """Rows that a query attends to at most, itself included; None without a bound."""

    def stage_summary(self) -> Mapping[str, int]:
        """What was done since the prefill began, counted: rows computed, rows recomputed, whatever the engine adds."""

    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        """Key (rotated) `[n_head_kv, head_dim_k]` and value of a position, as attention would read them.

        None where the engine does not hold the row. Raises IndexError for a layer that the model does not have,
        EmptyPrompt before a prefill, StateInvalidated.
        """

    def handle(self) -> StateHandle: ...


class RetrievalEngine(Protocol):
    """An engine that answers from a store of past windows instead of carrying all of their rows."""

    @property
    def info(self) -> EngineInfo: ...

    def ingest(self, weights: Weights, ffn: FfnRouter, tokens: Sequence[int]) -> None:
        """Add a context to the store."""

    def query(self, weights: Weights, ffn: FfnRouter, tokens: Sequence[int]) -> Floats:
        """The last row `[1, n_embd]` of a question, with what was retrieved for it. Raises RetrievalMiss."""

    def decode_step(self, weights: Weights, ffn: FfnRouter, token: int) -> Floats: ...

    def memory(self) -> Memory: ...

    def stage_summary(self) -> Mapping[str, int]: ...
