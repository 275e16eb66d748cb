"""A KV cache as plainly as it can be written: float64, one token at a time, one row object per token.

Independent of `kvtape.replay`: it knows no lineage, only rows that stand at cache positions. Tiny models only.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

__all__ = ["OracleModel", "OracleRow", "OracleSession"]

Array = npt.NDArray[np.float64]


class OracleModel:
    """llama (RoPE over neighbours), qwen2 and qwen3 (over halves) from a GGUF, all in float64."""

    def __init__(self, path: str | Path) -> None:
        reader = gguf.GGUFReader(str(path))
        self._weights: dict[str, Array] = {
            t.name: gguf.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors
        }
        arch = reader.fields["general.architecture"].contents()

        def field(key: str) -> Any:
            return reader.fields[f"{arch}.{key}"].contents()

        self.interleaved = arch == "llama"
        self.n_layer, self.n_head = int(field("block_count")), int(field("attention.head_count"))
        self.n_head_kv = int(field("attention.head_count_kv"))
        self.head_dim = int(field("attention.key_length"))
        self.eps, self.base = float(field("attention.layer_norm_rms_epsilon")), float(field("rope.freq_base"))
        self.n_vocab = len(self._weights["token_embd.weight"])

    def weight(self, name: str) -> Array:
        return self._weights[f"{name}.weight"]

    def norm(self, x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean() + self.eps) * self.weight(name)

    def heads(self, h: Array, layer: int, kind: str) -> Array:
        """`[n_heads, head_dim]` of projection q, k or v, unrotated."""
        name = f"blk.{layer}.attn_{kind}"
        rows = (self.weight(name) @ h + self._weights.get(f"{name}.bias", 0.0)).reshape(-1, self.head_dim)
        if f"{name}_norm.weight" in self._weights:
            rows = np.stack([self.norm(row, f"{name}_norm") for row in rows])
        return rows

    def rotate(self, heads: Array, position: int) -> Array:
        out = heads.copy()
        j = np.arange(self.head_dim // 2)
        a, b = (2 * j, 2 * j + 1) if self.interleaved else (j, j + self.head_dim // 2)
        angle = position * self.base ** (-2 * j / self.head_dim)
        out[:, a] = heads[:, a] * np.cos(angle) - heads[:, b] * np.sin(angle)
        out[:, b] = heads[:, a] * np.sin(angle) + heads[:, b] * np.cos(angle)
        return out


@dataclass
class OracleRow:
    """`keys` unrotated and `values`, one `[n_head_kv, head_dim]` a layer, of `token` at `cache`."""

    token: int
    cache: int
    keys: list[Array]
    values: list[Array]


class OracleSession:
    """Rows by tape position; every operation in tape positions, like the backends' protocol."""

    def __init__(self, model: OracleModel) -> None:
        self.model = model
        self.rows: dict[int, OracleRow] = {}

    def prefill(self, tokens: Sequence[int], tape_start: int) -> list[Array]:
        """Logits after every token."""
        return [self._compute(t, tape_start + i, self._next(), self.rows.values()) for i, t in enumerate(tokens)]

    def refill(self, tokens: Sequence[int], start: int, cache_start: int) -> Array:
        logits = np.empty(0)
        for i, token in enumerate(tokens):
            seen = [row for row in self.rows.values() if row.cache < cache_start + i]
            logits = self._compute(token, start + i, cache_start + i, seen)
        return logits

    def rebuild(self, ranges: Iterable[tuple[int, int]], tokens: Sequence[int]) -> Array:
        tape = [t for start, stop in ranges for t in range(start, stop)]
        self.rows = {}
        logits = np.empty(0)
        for position, token in zip(tape, tokens, strict=True):
            logits = self._compute(token, position, self._next(), self.rows.values())
        return logits

    def truncate(self, tape_stop: int) -> None:
        self.rows = {t: row for t, row in self.rows.items() if t < tape_stop}

    def evict(self, start: int, stop: int) -> list[OracleRow]:
        """The rows that left, in tape order: what a cold store would hold."""
        return [self.rows.pop(t) for t in range(start, stop)]

    def shift(self, cache_start: int, cache_stop: int, delta: int) -> None:
        for row in self.rows.values():
            if cache_start <= row.cache < cache_stop:
                row.cache += delta

    def admit(self, rows: Sequence[OracleRow], start: int, cache_start: int) -> None:
        for i, row in enumerate(rows):
            self.rows[start + i] = OracleRow(row.token, cache_start + i, row.keys, row.values)

    def snapshot(self) -> dict[int, OracleRow]:
        return {t: copy.copy(row) for t, row in self.rows.items()}

    def restore(self, saved: dict[int, OracleRow]) -> None:
        self.rows = {t: copy.copy(row) for t, row in saved.items()}

    def _next(self) -> int:
        return max((row.cache for row in self.rows.values()), default=-1) + 1

    def _compute(self, token: int, tape: int, cache: int, seen: Iterable[OracleRow]) -> Array:
        model = self.model
        visible = list(seen)
        row = OracleRow(token, cache, [], [])
        x = model.weight("token_embd")[token]
        for layer in range(model.n_layer):
            h = model.norm(x, f"blk.{layer}.attn_norm")
            row.keys.append(model.heads(h, layer, "k"))
            row.values.append(model.heads(h, layer, "v"))
            queries = model.rotate(model.heads(h, layer, "q"), cache)
            attended = self._attend(queries, [*visible, row], layer)
            x = x + model.weight(f"blk.{layer}.attn_output") @ attended
            h = model.norm(x, f"blk.{layer}.ffn_norm")
            gate = model.weight(f"blk.{layer}.ffn_gate") @ h
            up = model.weight(f"blk.{layer}.ffn_up") @ h
            x = x + model.weight(f"blk.{layer}.ffn_down") @ (gate / (1 + np.exp(-gate)) * up)
        self.rows[tape] = row
        h = model.norm(x, "output_norm")
        head = "output" if "output.weight" in model._weights else "token_embd"
        return model.weight(head) @ h

    def _attend(self, queries: Array, visible: list[OracleRow], layer: int) -> Array:
        model = self.model
        rotated = [model.rotate(row.keys[layer], row.cache) for row in visible]
        out = []
        for head, query in enumerate(queries):
            kv = head * model.n_head_kv // model.n_head
            scores = np.array([query @ keys[kv] for keys in rotated]) / np.sqrt(model.head_dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            out.append(sum(w * row.values[layer][kv] for w, row in zip(weights, visible, strict=True)))
        return np.concatenate(out)
