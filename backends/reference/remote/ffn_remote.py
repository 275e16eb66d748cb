"""Feed-forward layers computed by a server: the router for `kvtape ffn-server`.

A call is a pure function of its rows, so whatever did not come back may be asked for again (`http_calls`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

import numpy as np

from kvtape.backends.reference.errors import BackendFailure, ExecutionRefused
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.remote.frames import CONTENT_TYPE, MAX_ROWS, FfnFrame, FrameError, frame_bytes, model_key
from kvtape.backends.reference.remote.http_calls import Caller, Reply, Retry, json_text

__all__ = ["RemoteFfn", "told_frame"]

_ERROR_BYTES: Final = 2000


class RemoteFfn:
    """The layers of `weights`' model at `url` (`http://HOST:PORT`). One thread at a time; nothing is sent before the
    first call, so the server may start later, and come and go between calls.
    """

    def __init__(
        self, url: str, weights: Weights, retry: Retry | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        if weights.dtype != np.float32:
            raise ExecutionRefused("unsupported", "rows travel as float32; open the model in float32")
        self._key = model_key(weights)
        self._caller = Caller(url, self._key, retry, sleep)
        self.url = self._caller.url
        self.name = f"remote {self.url}"

    def feed(self, layer: int, h: Floats) -> Floats:
        """Raises BackendUnavailable where no attempt was answered, BackendFailure for an answer that cannot be used,
        ExecutionRefused where the server has another model.
        """
        out = np.empty_like(h)
        for start in range(0, len(h), MAX_ROWS):
            asked = FfnFrame(layer, self._key, h[start : start + MAX_ROWS])
            limit = max(_ERROR_BYTES, frame_bytes(*asked.rows.shape))
            reply = self._caller.call("POST", "/v1/ffn", asked.encode(), CONTENT_TYPE, limit)
            answer = told_frame(self._caller, reply)
            if (answer.layer, answer.model, answer.rows.shape) != (layer, self._key, asked.rows.shape):
                self.close()
                raise BackendFailure(f"{self.url}: rows of layer {answer.layer} where layer {layer} was asked")
            out[start : start + MAX_ROWS] = answer.rows
        return out

    def close(self) -> None:
        """Give the connection back; a later call opens another."""
        self._caller.close()


def told_frame(caller: Caller, reply: Reply) -> FfnFrame:
    """The frame of a reply. Raises BackendFailure with what the server said, or with what is wrong with the frame."""
    if reply.status != 200:
        said = json_text(reply.body, "error") or "an answer that is not of kvtape ffn-server"
        raise BackendFailure(f"{caller.url}: {said} (status {reply.status})")
    try:
        return FfnFrame.decode(reply.body)
    except FrameError as err:
        caller.close()
        raise BackendFailure(f"{caller.url}: {err}") from None
