"""One native context behind checked calls: what aborts the process when misused is refused here."""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import EnvironmentProblem
from kvtape.backends.llama.attention import AttentionTap
from kvtape.backends.llama.engine_words import read_words
from kvtape.backends.llama.kv_types import GGML_TYPES
from kvtape.backends.llama.native import NativeModel, engine_log, library
from kvtape.backends.protocol import FlashAttention

__all__ = ["LIVE", "SCRATCH", "ContextParams", "NativeContext"]

LIVE: Final = 0
"""The sequence that holds the session."""
SCRATCH: Final = 1
"""The sequence in which exports, imports, refills and flushes happen; empty between operations."""

_FLASH_TYPES: Final = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True, slots=True)
class ContextParams:
    """Sizes in tokens; `n_ctx` is what the native context can hold, scratch rows included."""

    n_ctx: int
    n_batch: int
    n_ubatch: int
    type_k: str
    type_v: str
    flash_attention: FlashAttention
    threads: int
    swa_full: bool


class NativeContext:
    """A unified context with two sequences. Raises EnvironmentProblem when the engine refuses to create it.

    `words` is what the engine says of it, `flash_attention` whether it runs. A `tap` can be given only here: the engine
    takes an evaluation callback when a context is created.
    """

    def __init__(self, model: NativeModel, params: ContextParams, tap: AttentionTap | None = None) -> None:
        lib = library()
        self._lib = lib
        self._model = model
        self._n_batch = params.n_batch
        mark = engine_log.mark()
        self._tap = tap
        self._context = lib.llama_init_from_model(model.pointer, _native_params(lib, params, tap))
        if not self._context:
            raise EnvironmentProblem(f"llama.cpp cannot create this context: {engine_log.quote(mark)}")
        self._free = weakref.finalize(self, lib.llama_free, self._context)
        self._memory = lib.llama_get_memory(self._context)
        self.n_ctx = int(lib.llama_n_ctx(self._context))
        self.can_shift = bool(lib.llama_memory_can_shift(self._memory))
        self.words = read_words(engine_log.since(mark, errors_only=False))
        self.flash_attention = _decided(params.flash_attention, self.words.flash_attention)
        self._batch = _Batch(lib, params.n_batch)
        # llama.cpp asks `bool f(void *data)` at every graph node, a thousand times a token. strlen is that function: of
        # b"" it is 0, of b"\1" it is 1. So cancelling is writing one byte, and no Python runs inside a decode.
        self._stop = ctypes.create_string_buffer(b"\0", 2)
        self._strlen = ctypes.cast(ctypes.CDLL(None).strlen, lib.llama_cpp.ggml_abort_callback)
        lib.llama_set_abort_callback(self._context, self._strlen, ctypes.cast(self._stop, ctypes.c_void_p))

    @property
    def _live(self) -> Any:
        if self._context is None:
            raise AssertionError("the native context was freed")
        return self._context

    def set_stop(self, stop: bool) -> None:
        """Make the running decode, or every later one, stop at its next graph node (return code 2)."""
        self._stop[0] = b"\1" if stop else b"\0"

    def decode(
        self,
        tokens: npt.NDArray[np.int32],
        position: int,
        sequence: int,
        *,
        want_logits: bool,
        each: bool = False,
    ) -> int:
        """Run `tokens` at consecutive positions; the engine's return code, 0 for success.

        Tokens must be in the vocabulary and at most n_batch; `want_logits` is for the last token alone, or for `each`.
        Raises TapError when attention that was wanted could not be read.
        """
        context = self._live
        n = len(tokens)
        assert 0 < n <= self._n_batch, f"{n} tokens in a batch of {self._n_batch}"
        assert sequence in (LIVE, SCRATCH), f"sequence {sequence}"
        self._batch.fill(tokens, position, sequence, want_logits, each)
        if self._tap is None:
            return int(self._lib.llama_decode(context, self._batch.struct))
        with self._tap.watch(lambda: self.set_stop(True)) as check:
            code = int(self._lib.llama_decode(context, self._batch.struct))
            if code == 0:
                check(n)
        return code

    def logits_of(self, n: int) -> npt.NDArray[np.float32]:
        """The logits after each of the last decode's `n` tokens, if it asked for each: float32 `[n, n_vocab]`."""
        rows = [self._lib.llama_get_logits_ith(self._live, i) for i in range(n)]
        return np.stack([np.ctypeslib.as_array(row, shape=(self._model.n_vocab,)) for row in rows])

    def logits(self) -> npt.NDArray[np.float32]:
        """A copy of the last token's logits, float32 `[n_vocab]`; only after a decode that returned 0."""
        pointer = self._lib.llama_get_logits_ith(self._live, -1)
        return np.ctypeslib.as_array(pointer, shape=(self._model.n_vocab,)).copy()

    def position_max(self, sequence: int) -> int:
        """The largest position in use; -1 when the sequence is empty."""
        self._check(sequence)
        return int(self._lib.llama_memory_seq_pos_max(self._memory, sequence))

    def remove(self, sequence: int, start: int, stop: int) -> bool:
        """Remove positions `[start, stop)`; a negative stop means to the end. False when the memory cannot."""
        self._check(sequence)
        return bool(self._lib.llama_memory_seq_rm(self._memory, sequence, start, stop))

    def copy(self, source: int, target: int, start: int, stop: int) -> None:
        """Let `target` hold the cells of `source` at `[start, stop)` too; no bytes are copied."""
        self._check(source)
        self._check(target)
        self._lib.llama_memory_seq_cp(self._memory, source, target, start, stop)

    def add(self, sequence: int, start: int, stop: int, delta: int) -> None:
        """Move positions by `delta`; keys are rotated in the next decode. Aborts the process on M-RoPE models."""
        self._check(sequence)
        assert not self._model.has_multi_rope, "M-RoPE positions cannot be shifted"
        self._lib.llama_memory_seq_add(self._memory, sequence, start, stop, delta)

    def clear(self) -> None:
        """Empty every sequence and zero the buffers."""
        assert self._live
        self._lib.llama_memory_clear(self._memory, True)

    def sequence_size(self, sequence: int) -> int:
        """Bytes of `read_sequence`."""
        self._check(sequence)
        return int(self._lib.llama_state_seq_get_size(self._live, sequence))

    def read_sequence(self, sequence: int) -> bytes:
        """The state of one sequence; empty bytes when the engine fails."""
        buffer = np.empty(self.sequence_size(sequence), np.uint8)
        n = self._lib.llama_state_seq_get_data(self._live, _address(buffer), len(buffer), sequence)
        return buffer[:n].tobytes()

    def read_sequence_start(self, sequence: int, n_bytes: int) -> bytes:
        """The first bytes of that state without the rows: the engine writes until the buffer is full, then gives up."""
        self._check(sequence)
        buffer = np.zeros(n_bytes, np.uint8)
        self._lib.llama_state_seq_get_data(self._live, _address(buffer), n_bytes, sequence)
        return buffer.tobytes()

    def write_sequence(self, sequence: int, state: bytes) -> bool:
        """Replace one sequence; False when the engine refuses, and then the sequence is empty."""
        self._check(sequence)
        buffer = np.frombuffer(state, np.uint8)
        return int(self._lib.llama_state_seq_set_data(self._live, _address(buffer), len(state), sequence)) == len(state)

    def read_all(self) -> bytes:
        """The state of all sequences; unlike `read_sequence` it has windowed rows beyond the window too."""
        buffer = np.empty(int(self._lib.llama_state_get_size(self._live)), np.uint8)
        n = self._lib.llama_state_get_data(self._live, _address(buffer), len(buffer))
        return buffer[:n].tobytes()

    def write_all(self, state: bytes) -> bool:
        """Replace all sequences; False when the engine refuses, and then the context is empty."""
        buffer = np.frombuffer(state, np.uint8)
        return int(self._lib.llama_state_set_data(self._live, _address(buffer), len(state))) == len(state)

    def close(self) -> None:
        """Free the context. Idempotent; done by itself when the last reference goes."""
        self._free()
        self._context = None
        self._memory = None

    def _check(self, sequence: int) -> None:
        assert self._live
        assert sequence in (LIVE, SCRATCH), f"sequence {sequence}"


class _Batch:
    """A reused llama_batch over numpy arrays; every token has one sequence, so all point at one number."""

    def __init__(self, lib: Any, capacity: int) -> None:
        self._tokens = np.zeros(capacity, np.int32)
        self._positions = np.zeros(capacity, np.int32)
        self._n_sequences = np.ones(capacity, np.int32)
        self._logits = np.zeros(capacity, np.int8)
        self._sequence = ctypes.c_int32(LIVE)
        pointer = ctypes.pointer(self._sequence)
        self._sequences = (ctypes.POINTER(ctypes.c_int32) * capacity)(*[pointer] * capacity)
        self.struct = lib.llama_batch()
        self.struct.token = self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.struct.pos = self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.struct.n_seq_id = self._n_sequences.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self.struct.seq_id = ctypes.cast(self._sequences, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32)))
        self.struct.logits = self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))

    def fill(self, tokens: npt.NDArray[np.int32], position: int, sequence: int, want_logits: bool, each: bool) -> None:
        n = len(tokens)
        self.struct.n_tokens = n
        self._tokens[:n] = tokens
        self._positions[:n] = np.arange(position, position + n)
        self._sequence.value = sequence
        self._logits[:n] = want_logits and each
        self._logits[n - 1] = want_logits


def _native_params(lib: Any, params: ContextParams, tap: AttentionTap | None) -> Any:
    native = lib.llama_context_default_params()
    if tap is not None:
        native.cb_eval = tap.callback
    native.n_ctx = params.n_ctx
    native.n_batch = params.n_batch
    native.n_ubatch = params.n_ubatch
    native.n_seq_max = 2
    native.kv_unified = True
    native.n_threads = params.threads
    native.n_threads_batch = params.threads
    native.flash_attn_type = _FLASH_TYPES[params.flash_attention]
    native.type_k = GGML_TYPES[params.type_k]
    native.type_v = GGML_TYPES[params.type_v]
    native.swa_full = params.swa_full
    native.no_perf = True
    return native


def _decided(asked: FlashAttention, said: bool | None) -> Literal["off", "on"]:
    """What runs. Raises EnvironmentProblem where the engine does not say, or runs something else than was asked."""
    if said is None:
        raise EnvironmentProblem("llama.cpp does not say whether flash attention runs; ask for on or off")
    decided: Literal["off", "on"] = "on" if said else "off"
    if asked not in ("auto", decided):
        raise EnvironmentProblem(f"llama.cpp turned flash attention {decided} on this model; ask for {decided} or auto")
    return decided


def _address(buffer: npt.NDArray[np.uint8]) -> Any:
    return buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
