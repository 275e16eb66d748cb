"""A GGUF as large as a real model, whose weights are a hole in the file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

__all__ = ["TENSOR_BYTES", "write_sparse_gguf"]

TENSOR_BYTES = 100_000_000
"""Of each tensor: 5,000 x 10,000 elements of f16."""


def write_sparse_gguf(path: Path, *, n_tensors: int, n_tokens: int) -> Path:
    """The keys of a llama, a vocabulary of `n_tokens`, and weights that take no disk."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(n_tensors)
    writer.add_context_length(8192)
    writer.add_embedding_length(4096)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_token_list([f"token{i}" for i in range(n_tokens)])
    for layer in range(n_tensors):
        writer.add_tensor_info(f"blk.{layer}.w", (5000, 10_000), np.dtype(np.float16), TENSOR_BYTES)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as handle:
        handle.truncate(path.stat().st_size + 4096 + n_tensors * TENSOR_BYTES)
    return path
