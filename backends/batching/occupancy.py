"""How full the pipeline's cache is, step by step: blocks from its metrics, rows from the blocks.

The pipeline says what share of its cache is in use, and how large the cache is. Both together are a whole number of
blocks, or we misread them. Only whole, completely filled blocks are ever evicted, and from each layer as many as from
the others, so the rows of a layer follow: the tokens so far, less `BLOCK` for each block that is gone. *Which* tokens
they are the pipeline does not say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtape.backends.batching.config import BLOCK
from kvtape.backends.errors import EnvironmentProblem
from kvtape.capacity.model import ModelShape
from kvtape.capacity.widths import row_bytes

__all__ = ["Step", "block_bytes", "blocks_in_use", "first_evicted", "resident_rows"]

_WIDTHS_KNOWN = ("f32", "f16")
_NEARLY = 1e-3
"""Of a block: the share is reported as a 32-bit float of percent."""


@dataclass(frozen=True, slots=True)
class Step:
    """One `step()`: `tokens` of the sequence, those of the step included, and the blocks that it was computed over."""

    tokens: int
    blocks: int

    @property
    def rows(self) -> int:
        """Rows of each layer that the step attended to, its own included."""
        return resident_rows(self.tokens, self.blocks)


def block_bytes(shape: ModelShape, kv_type: str) -> int | None:
    """Keys and values of `BLOCK` tokens in all layers; None where the pipeline's layout of the type is not known."""
    if kv_type not in _WIDTHS_KNOWN:
        return None
    heads = shape.n_head_kv
    row = row_bytes(kv_type, heads * shape.head_dim_k) + row_bytes(kv_type, heads * shape.head_dim_v)
    return BLOCK * shape.n_layer * row


def blocks_in_use(usage_percent: float, size_bytes: int, one_block: int) -> int:
    """Raises EnvironmentProblem when the figures are no whole number of blocks."""
    blocks = usage_percent / 100 * size_bytes / one_block
    whole = round(blocks)
    if abs(blocks - whole) > _NEARLY:
        raise EnvironmentProblem(
            f"continuous batching reports {usage_percent} % of {size_bytes} bytes in use: {blocks:.4f} blocks of "
            f"{one_block} bytes, which is no whole number; this version of openvino-genai counts otherwise"
        )
    return whole


def resident_rows(tokens: int, blocks: int) -> int:
    """Rows of a layer after `tokens` tokens of which `blocks` blocks are left."""
    return tokens - BLOCK * (-(-tokens // BLOCK) - blocks)


def first_evicted(steps: Sequence[Step]) -> int | None:
    """Index of the first step that was computed without all tokens before it; None when there is none."""
    return next((i for i, step in enumerate(steps) if step.rows < step.tokens), None)
