"""The library itself: loading it, its log, and a loaded model."""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from kvtape.backends.errors import EnvironmentProblem, InputRejected

__all__ = ["MULTI_ROPE", "EngineLog", "NativeModel", "engine_log", "library"]

# llama.cpp's rope types (enum llama_rope_type) whose positions have several components.
MULTI_ROPE: Final = frozenset({8, 24, 40})
_LOG_INFO, _LOG_CONTINUED = 2, 5
_MAX_TEXT_BYTES: Final = 2**31 - 1


class EngineLog:
    """The last lines the library logged, so that an error can quote the engine's own words."""

    def __init__(self) -> None:
        self._lines: deque[tuple[int, int, str]] = deque(maxlen=512)
        self._count = 0

    def add(self, level: int, text: str) -> None:
        if level >= _LOG_INFO:
            self._count += 1
            self._lines.append((self._count, level, text.rstrip()))

    def mark(self) -> int:
        """A place in the log for `since`."""
        return self._count

    def since(self, mark: int, *, errors_only: bool = True) -> list[str]:
        lowest = _LOG_INFO + 1 if errors_only else _LOG_INFO
        wanted = (line for line in self._lines if line[0] > mark and lowest <= line[1] < _LOG_CONTINUED)
        return [text for _, _, text in wanted if text]

    def quote(self, mark: int) -> str:
        """The last two warnings or errors after `mark`, as one clause."""
        return "; ".join(self.since(mark)[-2:]) or "the engine gave no reason"


engine_log: Final = EngineLog()


@functools.cache
def library() -> Any:
    """The `llama_cpp` module, initialised once.

    Two defaults are set when the environment has no opinion: OMP_WAIT_POLICY=passive, because spinning threads
    slow a shared machine by ten times, and GGML_NO_BACKTRACE=1, because a native abort would start a debugger. Both
    are read when the library loads. Raises EnvironmentProblem when it is not installed or does not load.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        import llama_cpp
    except ImportError as err:
        raise EnvironmentProblem(f"llama.cpp is not installed ({err}); pip install 'kvtape[llama]'") from None
    except (OSError, RuntimeError) as err:
        raise EnvironmentProblem(
            f"llama.cpp's library does not load: {err}; install it again: pip install --force-reinstall 'kvtape[llama]'"
        ) from None
    llama_cpp.llama_log_set(_log_callback(llama_cpp), None)
    llama_cpp.llama_backend_init()
    return llama_cpp


@functools.cache
def _log_callback(lib: Any) -> Any:
    """Kept alive by the cache: the library holds only its address."""

    def receive(level: int, text: bytes, _: Any) -> None:
        engine_log.add(level, text.decode("utf-8", "replace"))

    return lib.llama_log_callback(receive)


class NativeModel:
    """A loaded model and its vocabulary. Raises EnvironmentProblem when the engine cannot load the file."""

    def __init__(self, path: str) -> None:
        lib = library()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        mark = engine_log.mark()
        self._lib = lib
        self._model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise EnvironmentProblem(
                f"{path}: llama.cpp cannot load this model: {engine_log.quote(mark)}"
                "; kvtape doctor --model FILE says what works here"
            )
        self._free = weakref.finalize(self, lib.llama_model_free, self._model)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))
        self.n_ctx_train = int(lib.llama_model_n_ctx_train(self._model))
        self.window = max(0, int(lib.llama_model_n_swa(self._model)))
        self.is_recurrent = bool(lib.llama_model_is_recurrent(self._model))
        self.is_hybrid = bool(lib.llama_model_is_hybrid(self._model))
        self.has_multi_rope = int(lib.llama_model_rope_type(self._model)) in MULTI_ROPE
        self.has_encoder = bool(lib.llama_model_has_encoder(self._model))
        self.arch = self.metadata("general.architecture") or ""

    @property
    def pointer(self) -> Any:
        """What native calls take."""
        if self._model is None:
            raise EnvironmentProblem("the model was closed")
        return self._model

    def metadata(self, key: str) -> str | None:
        """A scalar of the file's metadata as text; None when the file does not have it."""
        buffer = ctypes.create_string_buffer(256)
        size = self._lib.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode("utf-8", "replace") if size >= 0 else None

    def end_tokens(self) -> frozenset[int]:
        """Every token that ends a generation."""
        is_end = self._lib.llama_vocab_is_eog
        return frozenset(token for token in range(self.n_vocab) if is_end(self._vocab, token))

    def tokenize(self, text: str) -> list[int]:
        """Plain text: nothing added, no special token parsed. Raises InputRejected for text that is not UTF-8."""
        try:
            raw = text.encode("utf-8")
        except UnicodeEncodeError as err:
            raise InputRejected(
                f"text is not valid Unicode at character {err.start}: {err.reason}"
                "; give text that can be written as UTF-8"
            ) from None
        if len(raw) > _MAX_TEXT_BYTES:
            raise InputRejected(f"text of {len(raw)} bytes is too long to tokenise; split it below 2 GiB")
        if not raw:
            return []
        capacity = len(raw) + 8
        while True:
            tokens = (ctypes.c_int32 * capacity)()
            n = self._lib.llama_tokenize(self._vocab, raw, len(raw), tokens, capacity, False, False)
            if n >= 0:
                return list(tokens[:n])
            if n == -(2**31) or -n <= capacity:
                raise InputRejected(f"the vocabulary cannot tokenise this text of {len(raw)} bytes; split it")
            capacity = -n

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of the tokens, special ones spelled out; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(self._piece(token) for token in tokens).decode("utf-8", "replace")

    def _piece(self, token: int) -> bytes:
        if not 0 <= token < self.n_vocab:
            raise InputRejected(f"token {token} is not in the vocabulary of {self.n_vocab}")
        capacity = 64
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            n = self._lib.llama_token_to_piece(self._vocab, token, buffer, capacity, 0, True)
            if n >= 0:
                return buffer.raw[:n]
            capacity = -n

    def close(self) -> None:
        """Free the model; its contexts must be closed before. Idempotent; done when the last reference goes."""
        self._free()
        self._model = None
