"""Running tokens through the engine: pieces, cancelling, what the return codes mean."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvtape.backends.errors import Cancelled, EngineFault, FatalClass
from kvtape.backends.llama.attention import TapError
from kvtape.backends.llama.context import NativeContext
from kvtape.backends.llama.native import engine_log
from kvtape.backends.protocol import Computed, Logits

__all__ = ["Decoder"]

_NO_ROOM, _STOPPED = 1, 2


class Decoder:
    """Decodes in pieces of at most `chunk` tokens. Only `cancel` may be called from another thread."""

    def __init__(self, context: NativeContext, chunk: int) -> None:
        self._context = context
        self._chunk = chunk
        self._lock = threading.Lock()
        self._running = False
        self._cancelled = False
        self._abort_next = False

    def cancel(self) -> None:
        """Stop the running decode at its next graph node, or the next operation before it begins."""
        with self._lock:
            self._cancelled = True
            if self._running:
                self._context.set_stop(True)

    def abort_next(self) -> None:
        """Stop the next decode although nobody cancelled."""
        self._abort_next = True

    def raise_if_cancelled(self) -> None:
        """Raise Cancelled once for each request."""
        with self._lock:
            if self._cancelled:
                self._cancelled = False
                raise Cancelled("cancelled; the session is as it was before the operation")

    def run(self, tokens: npt.NDArray[np.int32], position: int, sequence: int, failure: FatalClass) -> Computed:
        """Compute `tokens` at consecutive positions; logits of the last.

        No shift may be pending. Raises Cancelled, with rows left behind that the caller removes, or EngineFault:
        `failure`, or allocator_exhausted when the cache has no room.
        """
        calls = 0
        for start in range(0, len(tokens), self._chunk):
            self.raise_if_cancelled()
            piece = tokens[start : start + self._chunk]
            is_last = start + self._chunk >= len(tokens)
            self._piece(piece, position + start, sequence, failure, want_logits=is_last)
            calls += 1
        return Computed(self._context.logits(), calls, len(tokens))

    def run_each(self, tokens: npt.NDArray[np.int32], position: int, sequence: int, failure: FatalClass) -> Logits:
        """The same in one call, with the logits after each token, `[n, n_vocab]`."""
        self.raise_if_cancelled()
        self._piece(tokens, position, sequence, failure, want_logits=True, each=True)
        return self._context.logits_of(len(tokens))

    def _piece(
        self,
        piece: npt.NDArray[np.int32],
        position: int,
        sequence: int,
        failure: FatalClass,
        *,
        want_logits: bool,
        each: bool = False,
    ) -> None:
        mark = engine_log.mark()
        try:
            code = self._decode(piece, position, sequence, want_logits=want_logits, each=each)
        except TapError as err:
            raise EngineFault(failure, f"{len(piece)} tokens at cache position {position}: {err}") from err
        if code == _STOPPED:
            self.raise_if_cancelled()
        if code != 0:
            kind = FatalClass.ALLOCATOR_EXHAUSTED if code == _NO_ROOM else failure
            why = f"llama_decode returned {code} for {len(piece)} tokens at cache position {position}"
            raise EngineFault(kind, f"{why}: {engine_log.quote(mark)}")

    def _decode(
        self, piece: npt.NDArray[np.int32], position: int, sequence: int, *, want_logits: bool, each: bool
    ) -> int:
        with self._lock:
            self._running = True
            self._context.set_stop(self._cancelled or self._abort_next)
            self._abort_next = False
        try:
            return self._context.decode(piece, position, sequence, want_logits=want_logits, each=each)
        finally:
            # The lock keeps a late cancel from leaving the stop byte set over a decode that must not be stopped.
            with self._lock:
                self._running = False
                self._context.set_stop(False)
