"""What a `ContinuousBatchingPipeline` is opened with: cache, native eviction, sparse attention. Sizes in tokens.

What the pipeline would take in silence, or refuse after minutes of work, is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from kvtape.backends.errors import UsageError
from kvtape.planner.grammar import Option, SpecError, choose_name, parse_options, parse_spec

__all__ = [
    "BLOCK",
    "COMPARATOR",
    "KV_TYPES",
    "Aggregation",
    "BatchingConfig",
    "Eviction",
    "Sparse",
    "read_eviction",
]

BLOCK: Final = 32
"""Tokens of one block of the pipeline's cache on the CPU."""

COMPARATOR: Final = "continuous-batching"

KV_TYPES: Final = ("f32", "f16", "u8")
"""What its cache can really be beside f32 inference; bf16 fails, and u8 is what it takes when nothing is said."""

Aggregation = Literal["sum", "norm_sum", "adaptive_rkv"]


@dataclass(frozen=True, slots=True)
class Eviction:
    """Native eviction: blocks between the first `start` and the last `recent` tokens go until `most` are left.

    `most` counts whole blocks: beside them there is the block that is being filled. `aggregation` of scores over steps;
    `window`: queries of the prompt that score first (0: all); `rotation`: re-base positions after an evict;
    `crush`: blocks kept in addition by KVCrush, 0 without. Raises UsageError.
    """

    start: int = BLOCK
    recent: int = BLOCK
    most: int = 8 * BLOCK
    aggregation: Aggregation = "norm_sum"
    window: int = 8
    rotation: bool = False
    crush: int = 0

    def __post_init__(self) -> None:
        for name, value in (("start", self.start), ("recent", self.recent), ("most", self.most)):
            if value < BLOCK or value % BLOCK:
                raise UsageError(
                    f"{COMPARATOR}: {name}={value} is not a multiple of its block of {BLOCK} tokens; choose one that is"
                )
        if self.most <= self.start + self.recent:
            raise UsageError(
                f"{COMPARATOR}: most={self.most} leaves nothing to choose between start={self.start} and "
                f"recent={self.recent}; raise it to {self.start + self.recent + BLOCK} or more"
            )

    @property
    def peak(self) -> int:
        """The most rows that are resident at once after the first evict, in whole blocks."""
        return self.most + BLOCK * (1 + self.crush)

    @property
    def label(self) -> str:
        """The spec text that `read_eviction` takes."""
        parts = [f"start={self.start}", f"recent={self.recent}", f"most={self.most}"]
        given = (("aggregation", self.aggregation), ("window", self.window), ("crush", self.crush))
        parts += [f"{name}={value}" for name, value in given if value != getattr(_DEFAULT, name)]
        parts += ["rotation=yes"] if self.rotation else []
        return f"{COMPARATOR}:{','.join(parts)}"


@dataclass(frozen=True, slots=True)
class Sparse:
    """Sparse attention of the prompt. `xattention`: blocks up to a cumulative `threshold` of estimated attention;
    `trishape`: the first `start` and the last `recent` cached tokens. The last `dense` tokens of the prompt see all.
    """

    mode: Literal["xattention", "trishape"]
    threshold: float = 0.8
    dense: int = 100
    start: int = 128
    recent: int = 1920


@dataclass(frozen=True, slots=True)
class BatchingConfig:
    """`blocks` of the cache; a prompt is computed in pieces of `chunk` tokens. Raises UsageError."""

    blocks: int
    chunk: int = 256
    threads: int = 1
    kv_type: str = "f32"
    eviction: Eviction | None = None
    sparse: Sparse | None = None
    prefix_caching: bool = False

    def __post_init__(self) -> None:
        if self.blocks < 1 or self.chunk < 1 or self.threads < 1:
            raise UsageError(
                f"{COMPARATOR}: {self.blocks} blocks, pieces of {self.chunk}, {self.threads} threads; all at least 1"
            )
        if self.kv_type not in KV_TYPES:
            raise UsageError(f"{COMPARATOR} cannot store rows as {self.kv_type!r}; ask for {', '.join(KV_TYPES)}")


_DEFAULT: Final = Eviction()

_OPTIONS = {
    "start": Option(int, _DEFAULT.start, (1, None)),
    "recent": Option(int, _DEFAULT.recent, (1, None)),
    "most": Option(int, None, (1, None)),
    "aggregation": Option(str, _DEFAULT.aggregation, get_args(Aggregation)),
    "window": Option(int, _DEFAULT.window, (0, None)),
    "crush": Option(int, _DEFAULT.crush, (0, None)),
}


def read_eviction(text: str, most: int | None = None) -> Eviction:
    """`continuous-batching[:start=..,recent=..,most=..,aggregation=..,window=..,crush=..]`; `most` is for a spec that
    names none. `rotation` cannot be asked for: it damages the memory of its process. Raises SpecError, UsageError.
    """
    spec = parse_spec(text)
    choose_name("comparator", spec.name, (COMPARATOR,))
    given: dict[str, Any] = parse_options(spec, _OPTIONS)
    if given["most"] is None:
        if most is None:
            raise SpecError(f"{text}: names no most; give it in the spec (tokens) or with --budget-blocks")
        given["most"] = most
    return Eviction(**given)
