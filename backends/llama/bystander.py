"""A `llama_cpp.Llama` that somebody else made and drives: what it is, and what its memory holds. Only ever read.

The object is handed in; its module is the one it came from, whose log and defaults stay as its owner set them.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.fit import read_shape
from kvtape.backends.llama.blob import parse_sequence
from kvtape.backends.llama.kv_types import GGML_TYPES
from kvtape.backends.llama.native import MULTI_ROPE
from kvtape.planner.rows import SessionRow

__all__ = ["Bystander", "Fed", "is_llama"]

_SEQUENCE: Final = 0
"""The one sequence that `llama_cpp.Llama` generates in."""

_FLASH: Final = {0: False, 1: True}
_NEEDED: Final = ("_ctx", "_model", "input_ids", "n_tokens", "n_batch", "context_params", "model_path")


def is_llama(thing: object) -> bool:
    """Whether it is a `llama_cpp.Llama`, or one of a class made from it; llama_cpp is not imported for the answer."""
    known = (f"{c.__module__}.{c.__qualname__}" for c in type(thing).__mro__)
    return "llama_cpp.llama.Llama" in known


@dataclass(frozen=True, slots=True)
class Fed:
    """What one decode call was given: ids and positions int32 `[n]`; `alone`: every token is of sequence 0 only."""

    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    alone: bool


class Bystander:
    """Reads a live `Llama`. Raises UnsupportedOperation for one without the parts that are read here."""

    def __init__(self, llama: Any) -> None:
        self._lib: Any = sys.modules["llama_cpp"]
        missing = [name for name in _NEEDED if not hasattr(llama, name)]
        if missing:
            version = getattr(self._lib, "__version__", "?")
            raise UnsupportedOperation("capture", f"llama-cpp-python {version} has no Llama.{missing[0]}")
        if not llama._ctx.ctx or not llama._model.model or not llama._ctx.memory:
            raise UnsupportedOperation("capture", "this Llama has no KV cache (it was closed, or keeps none)")
        self._llama = llama
        self.recurrent = bool(self._lib.llama_model_is_recurrent(llama._model.model))
        self.hybrid = bool(self._lib.llama_model_is_hybrid(llama._model.model))
        self._extended = int(self._lib.llama_model_rope_type(llama._model.model)) in MULTI_ROPE
        self._several = int(llama.context_params.n_seq_max) > 1

    @property
    def version(self) -> str:
        return f"llama-cpp-python {self._lib.__version__}"

    @property
    def n_ctx(self) -> int:
        return int(self._llama.n_ctx())

    def session_row(self, run_id: str, session_id: str, *, content: bool) -> SessionRow:
        """What the object says of how it was opened; of the cold store and the abilities nothing is claimed."""
        llama, params = self._llama, self._llama.context_params
        names = {number: name for name, number in GGML_TYPES.items()}
        shape = read_shape(llama.model_path)
        return SessionRow(
            run_id=run_id,
            session_id=session_id,
            backend="llama",
            engine_version=self.version,
            model_fingerprint=shape.fingerprint,
            model_name=Path(llama.model_path).name,
            policy="none",
            n_ctx_asked=int(params.n_ctx) or None,
            n_ctx=self.n_ctx,
            chunk=int(llama.n_batch),
            kv_type_k=names.get(int(params.type_k)),
            kv_type_v=names.get(int(params.type_v)),
            flash_attention=_FLASH.get(int(params.flash_attn_type)),
            threads=int(params.n_threads),
            content=content,
        )

    def fed(self, batch: Any) -> Fed:
        """What a `LlamaBatch` holds now. Raises UnsupportedOperation for one of embeddings instead of tokens."""
        raw = batch.batch
        n = int(raw.n_tokens)
        if n and not raw.token:
            raise UnsupportedOperation("capture", "a batch of embeddings has no tokens")
        if not n:
            return Fed(np.empty(0, np.int32), np.empty(0, np.int32), True)
        tokens = np.ctypeslib.as_array(raw.token, (n,)).astype(np.int32)
        positions = np.ctypeslib.as_array(raw.pos, (n,)).astype(np.int32)
        alone = not self._several or all(raw.n_seq_id[i] == 1 and raw.seq_id[i][0] == _SEQUENCE for i in range(n))
        return Fed(tokens, positions, alone)

    def position_max(self) -> int:
        """The largest position in the engine's memory, -1 when it is empty; costs next to nothing."""
        return int(self._lib.llama_memory_seq_pos_max(self._llama._ctx.memory, _SEQUENCE))

    def positions(self) -> npt.NDArray[np.int64]:
        """Positions of the cells that the engine's memory holds, ascending; of a windowed model its full cache.

        Copies the sequence's whole state. A recurrent memory has one cell for all tokens: then by its last position.
        Raises StateRejected for a state that is not in the layout of this version.
        """
        last = self.position_max()
        if self.recurrent or last < 0:
            return np.arange(last + 1, dtype=np.int64)
        context = self._llama._ctx.ctx
        buffer = np.empty(int(self._lib.llama_state_seq_get_size(context, _SEQUENCE)), np.uint8)
        where = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        n = int(self._lib.llama_state_seq_get_data(context, where, len(buffer), _SEQUENCE))
        # The cells of the first cache come first; whatever follows is not looked at.
        state = parse_sequence(buffer[:n].tobytes(), extended=self._extended, latent=self._latent(), n_caches=1)
        return np.sort(state.caches[0].positions.astype(np.int64))

    def _latent(self) -> bool:
        said = self._llama.metadata
        arch = said.get("general.architecture", "")
        return all(int(said.get(f"{arch}.attention.{part}_length_mla", "0")) > 0 for part in ("key", "value"))
