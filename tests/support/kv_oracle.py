"""What an engine must compute, said plainly: a list of every row there ever was, and two rules about them.

One token at a time goes through the layers. For each layer, `sees` says which positions the token attends to, and
`codec` what is left of an old row before its keys and values are made again. No store, no window, no transaction.
"""

from __future__ import annotations

import copy

import numpy as np

from kvtape.backends.reference.engines.codec_policy import CodecPolicy, parse_codec_policy
from kvtape.backends.reference.engines.row_codecs import RowCodec
from kvtape.backends.reference.model.blas import Floats, one_blas_thread
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.pages import paged
from kvtape.backends.reference.model.steps import attention_of, attn_out, embed, ffn, key_values, qkv
from kvtape.backends.reference.model.weights import Weights

__all__ = ["PlainSession"]


class PlainSession:
    """`window` > 0: windows that begin anew from one row, `cold_after` > 0: rows that old are written by `codecs`."""

    def __init__(self, model: Weights, *, window: int = 0, cold_after: int = 0, codecs: str = "f32") -> None:
        self._model, self._window, self._cold_after = model, window, cold_after
        policy: CodecPolicy = parse_codec_policy(codecs)
        self._codecs: tuple[RowCodec, ...] = policy.of(model.architecture.n_layer)
        self.n = 0
        self._inputs: list[list[Floats]] = [[] for _ in self._codecs]

    def copy(self) -> PlainSession:
        """One that goes on by itself."""
        other = copy.copy(self)
        other._inputs = [list(rows) for rows in self._inputs]
        return other

    def tokens(self, ids: list[int], *, prompt: bool = False) -> Floats:
        """The last row behind the last layer `[n_embd]`. A prompt's rows see each other as they are."""
        cold = 0 if prompt else None
        for token in ids:
            row = self._token(token, cold)
        return row

    def _token(self, token: int, cold: int | None) -> Floats:
        at, local = np.array([self.n], np.int64), LocalFfn(self._model)
        n_cold = max(0, self.n - self._cold_after) if cold is None and self._cold_after else 0
        with one_blas_thread():
            x = embed(self._model, [token])
            for layer in range(len(self._codecs)):
                self._inputs[layer].append(x)
                seen = self._sees(self.n)
                rows = np.concatenate([self._row(layer, p, n_cold) for p in seen])
                pages = paged(seen, *key_values(self._model, layer, rows, seen))
                attended = attention_of(self._model, layer, qkv(self._model, layer, x, at).q, at, pages)
                x = x + attn_out(self._model, layer, attended)
                x = x + ffn(self._model, layer, x, local)
        self.n += 1
        return np.asarray(x[0])

    def _sees(self, p: int) -> np.ndarray:
        start = p // self._window * self._window if self._window else 0
        return np.arange(max(0, start - 1), p + 1, dtype=np.int64)

    def _row(self, layer: int, position: int, n_cold: int) -> Floats:
        row, codec = self._inputs[layer][position], self._codecs[layer]
        return codec.decode(codec.encode(row), self._model.dtype) if position < n_cold else row
