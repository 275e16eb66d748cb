"""Every option of continuous batching that leaves attention or rows out, at settings that keep all and that do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvtape.backends.batching.config import BLOCK, BatchingConfig, Eviction, Sparse
from kvtape.backends.errors import UsageError

__all__ = ["Case", "option_cases"]

_CRUSH = 2
"""Blocks that KVCrush keeps beside the budget."""


@dataclass(frozen=True, slots=True)
class Case:
    """`option` and its `setting` as text. `exact`: the setting leaves nothing out, so the output must be dense's.

    `again`: what counts is a later run of the same prompt on one pipeline.
    """

    option: str
    setting: str
    config: BatchingConfig
    exact: bool
    again: bool = False

    @property
    def group(self) -> tuple[str, BatchingConfig]:
        """Settings that compute in the same way: the same option, the prompt cut alike, as many tokens dense."""
        dense = 0 if self.config.sparse is None else self.config.sparse.dense
        sparse = None if self.config.sparse is None else Sparse(self.config.sparse.mode, dense=dense)
        return self.option, replace(self.config, eviction=None, sparse=sparse)


def option_cases(n_prompt: int, n_new: int, *, budget: int, chunk: int, threads: int = 1) -> list[Case]:
    """For a prompt of `n_prompt` tokens, computed whole or in pieces of `chunk`; evictions keep `budget` tokens.

    Raises UsageError for sizes that do not fit each other.
    """
    if not BLOCK <= chunk < n_prompt:
        raise UsageError(f"pieces of {chunk} tokens of a prompt of {n_prompt}: they must be at least {BLOCK} and fewer")
    peak = Eviction(most=budget, crush=_CRUSH).peak
    if n_prompt <= peak:
        raise UsageError(
            f"a budget of {budget} evicts nothing of {n_prompt} tokens; raise --tokens over {peak} or lower "
            "--budget-blocks"
        )
    blocks = -(-(n_prompt + n_new) // BLOCK) + 2
    whole = BatchingConfig(blocks, BLOCK * blocks, threads)
    pieces = replace(whole, chunk=chunk)
    return [
        *_xattention(whole, pieces),
        *_trishape(replace(whole, chunk=BLOCK), BLOCK * blocks),
        *_evictions(pieces, budget, BLOCK * blocks),
        Case("prefix_caching", "second run", replace(pieces, prefix_caching=True), exact=True, again=True),
    ]


def _xattention(whole: BatchingConfig, pieces: BatchingConfig) -> Iterator[Case]:
    for config, cut in ((whole, "whole prompt"), (pieces, f"pieces of {pieces.chunk}")):
        for dense in (0, 100):
            for threshold in (1.0, 0.95, 0.9, 0.8, 0.5):
                # The last tokens are computed dense, and of a prompt in one piece that changes nothing.
                if dense and (config is whole or threshold in (0.95, 0.5)):
                    continue
                sparse = Sparse("xattention", threshold, dense)
                setting = f"threshold={threshold:g}, {f'last {dense} dense, ' if dense else ''}{cut}"
                yield Case("xattention", setting, replace(config, sparse=sparse), exact=threshold == 1.0)


def _trishape(pieces: BatchingConfig, everything: int) -> Iterator[Case]:
    for recent in (everything, 8 * BLOCK, 2 * BLOCK):
        config = replace(pieces, sparse=Sparse("trishape", dense=BLOCK, start=BLOCK, recent=recent))
        kept = "all" if recent == everything else f"{BLOCK} + {recent}"
        yield Case("trishape", f"keeps {kept}, pieces of {BLOCK}", config, exact=recent == everything)


def _evictions(pieces: BatchingConfig, budget: int, everything: int) -> Iterator[Case]:
    ways = {
        "eviction_sum": Eviction(most=budget, aggregation="sum"),
        "eviction_norm_sum": Eviction(most=budget),
        "snapkv_window_0": Eviction(most=budget, window=0),
        "kvcrush": Eviction(most=budget, crush=_CRUSH),
        "adaptive_rkv": Eviction(most=budget, aggregation="adaptive_rkv"),
        "rotation": Eviction(most=budget, rotation=True),
    }
    for option, eviction in ways.items():
        for most in (everything, budget):
            config = replace(pieces, eviction=replace(eviction, most=most))
            setting = "budget for all" if most == everything else f"most={most}"
            yield Case(option, setting, config, exact=most == everything)
    smallest = replace(ways["rotation"], most=3 * BLOCK)
    yield Case("rotation", f"most={smallest.most}", replace(pieces, eviction=smallest), exact=False)
