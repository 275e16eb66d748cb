"""Surrogate tokens for a log without content: drawn from its keyed hashes, so that what was shared stays shared.

Token i of a block is a function of the block's hash and i, over the ids that the model's vocabulary uses for text. A
position keeps the token it got when it came onto the tape, whatever computes it again. Two sessions that began alike
begin alike here too, as far as whole blocks go; what was said is not in the log and does not come back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import UsageError
from kvtape.capacity.gguf_file import open_gguf
from kvtape.planner.events import Event, Op
from kvtape.planner.rows import TokensRow
from kvtape.traces.surrogates import block_tokens_of

__all__ = ["text_ids", "with_surrogates"]

_NORMAL = 1
"""`tokenizer.ggml.token_type` of a token that stands for text."""


def text_ids(model: Path, n_vocab: int) -> npt.NDArray[np.int64]:
    """Ids that stand for text, ascending; all ids where the model does not say which do (a folder never does)."""
    if model.is_dir():
        return np.arange(n_vocab)
    field = open_gguf(model).get_field("tokenizer.ggml.token_type")
    kinds = np.asarray([] if field is None else field.contents(), np.int64)[:n_vocab]
    ids: npt.NDArray[np.int64] = np.flatnonzero(kinds == _NORMAL)
    return ids if ids.size else np.arange(n_vocab)


def with_surrogates(
    session_id: str, events: Sequence[Event], tokens: Mapping[int, TokensRow], ids: npt.NDArray[np.int64]
) -> dict[int, TokensRow]:
    """The rows with tokens in them. Raises UsageError where the log has no hashes of what was computed."""
    tape: list[int] = []
    saved: dict[int, list[int]] = {}
    found: dict[int, TokensRow] = {}
    for event in events:
        if event.op == Op.LOST:
            break
        if event.op == Op.TRUNCATE and event.start is not None:
            del tape[event.start :]
        elif event.op == Op.SNAPSHOT and event.snapshot_id is not None:
            saved[event.snapshot_id] = tape[:]
        elif event.op == Op.RESTORE and event.snapshot_id is not None:
            tape = saved.get(event.snapshot_id, [])[:]
        row = tokens.get(event.seq)
        if row is None:
            continue
        stop = row.start + row.n_tokens
        if event.op in (Op.PREFILL, Op.DECODE) and row.start == len(tape):
            tape += _drawn(session_id, row, ids)
        found[event.seq] = replace(row, tokens=tuple(tape[row.start : stop]))
    return found


def _drawn(session_id: str, row: TokensRow, ids: npt.NDArray[np.int64]) -> list[int]:
    hashes = json.loads(row.hashes)
    first = row.start // row.block_tokens
    if len(hashes) != -(-(row.start + row.n_tokens) // row.block_tokens) - first:
        raise UsageError(
            f"session {session_id}, seq {row.seq}: neither its tokens nor their hashes are in the log, so it cannot be "
            "replayed on an engine; record with --content"
        )
    drawn = np.concatenate([block_tokens_of(int(h, 16), row.block_tokens, ids) for h in hashes])
    offset = row.start - first * row.block_tokens
    tokens: list[int] = drawn[offset : offset + row.n_tokens].tolist()
    return tokens
