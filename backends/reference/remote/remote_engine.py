"""A KV engine whose rows live at a server: tokens go there, the last row comes back. Any KV engine of the catalogue.

Contract: that of the engine at the server, whose bits it gives. Feed-forward layers are computed where the rows are, so
a router to anywhere else is refused (`residency`). A step that was not answered may be tried again with the identical
token, also where the server had computed it. A server that lost the rows (started again, or holding too many
sessions) is StateInvalidated: nothing here can make them again.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import numpy as np

from kvtape.backends.reference.engines.engine import EngineInfo, KvEngine, Memory, MemoryKind, StateHandle
from kvtape.backends.reference.engines.registry import EngineChoice, make_engine
from kvtape.backends.reference.errors import (
    BackendFailure,
    BackendUnavailable,
    EmptyPrompt,
    ExecutionRefused,
    StateInvalidated,
)
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.tokens import checked_tokens
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.remote.ffn_remote import RemoteFfn, told_frame
from kvtape.backends.reference.remote.frames import frame_bytes, model_key
from kvtape.backends.reference.remote.http_calls import Caller, Reply, Retry
from kvtape.backends.reference.remote.server import SESSION_TYPE

__all__ = ["RemoteEngine"]

_JSON_BYTES: Final = 100_000
_RETRY: Final = Retry(timeout_s=600.0)
"""A prefill at the server may take its time."""


class RemoteEngine:
    """One session at `url`. Raises ExecutionRefused for an engine that is no KV engine, and for float64 weights."""

    def __init__(
        self,
        url: str,
        choice: EngineChoice,
        weights: Weights,
        retry: Retry | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        engine = make_engine(choice)
        if not isinstance(engine, KvEngine):
            raise ExecutionRefused("unsupported", f"{choice.spec} is no KV engine; a server holds only those")
        if weights.dtype != np.float32:
            raise ExecutionRefused("unsupported", "rows travel as float32; open the model in float32")
        self.info: EngineInfo = engine.info
        self._window = engine.window_tokens
        self._weights, self._key = weights, model_key(weights)
        self._caller = Caller(url, self._key, retry or _RETRY, sleep)
        self._path = ""
        self._n_tokens = 0
        self._lost: str | None = None

    def prefill(self, weights: Weights, ffn: FfnRouter, tokens: Sequence[int]) -> Floats:
        """A session of its own at the server: where the answer is lost, the one before is as it was."""
        ids = checked_tokens(tokens, weights.n_vocab)
        self._check(weights, ffn)
        path = f"/v1/sessions/{uuid.uuid4().hex}"
        hidden = self._asked("PUT", path, {"spec": self.info.spec, "tokens": ids.tolist()})
        before, self._path, self._n_tokens, self._lost = self._path, path, len(ids), None
        if before:
            with suppress(BackendUnavailable, BackendFailure):
                self._call("DELETE", before, None, _JSON_BYTES)
        return hidden

    def decode_step(self, weights: Weights, ffn: FfnRouter, token: int) -> Floats:
        self._begun()
        ids = checked_tokens([token], weights.n_vocab)
        self._check(weights, ffn)
        hidden = self._asked("POST", f"{self._path}/step", {"tokens": ids.tolist(), "n_tokens": self._n_tokens})
        self._n_tokens += 1
        return hidden

    def memory(self) -> Memory:
        """At the server. Before a prefill, nothing."""
        if not self._n_tokens:
            return Memory(0, 0, ())
        memory = dict(self._told()["memory"])
        kinds = tuple(MemoryKind(**kind) for kind in memory.pop("kinds"))
        return Memory(**memory, kinds=kinds)

    @property
    def window_tokens(self) -> int | None:
        return self._window

    def stage_summary(self) -> Mapping[str, int]:
        return dict(self._told()["stages"]) if self._n_tokens else {}

    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None:
        self._begun()
        shape = self._weights.architecture.shape
        if not 0 <= layer < shape.n_layer:
            raise IndexError(f"layer {layer} of a model with {shape.n_layer}")
        if position < 0:
            return None
        width = shape.n_head_kv * (shape.head_dim_k + shape.head_dim_v)
        reply = self._call("GET", f"{self._path}/rows/{layer}/{position}", None, frame_bytes(1, width))
        if reply == (200, b"null"):
            return None
        row = told_frame(self._caller, reply).rows[0].reshape(-1)
        keys, values = np.split(row, [shape.n_head_kv * shape.head_dim_k])
        return keys.reshape(shape.n_head_kv, -1), values.reshape(shape.n_head_kv, -1)

    def handle(self) -> StateHandle:
        return StateHandle(self.info.spec, self._n_tokens, "remote", self._caller.url)

    def close(self) -> None:
        """End the session at the server, where it is still there."""
        if self._n_tokens:
            self._call("DELETE", self._path, None, _JSON_BYTES)
        self._caller.close()
        self._path, self._n_tokens = "", 0

    def _begun(self) -> None:
        if self._lost:
            raise StateInvalidated(self._lost)
        if not self._n_tokens:
            raise EmptyPrompt("nothing was prefilled; prefill a prompt first")

    def _check(self, weights: Weights, ffn: FfnRouter) -> None:
        if weights is not self._weights:
            raise ExecutionRefused("binding_defect", f"{self.info.name} was made for other weights")
        if not isinstance(ffn, RemoteFfn) or ffn.url != self._caller.url:
            why = f"the rows live at {self._caller.url}, and feed-forward layers are computed there; not {ffn.name}"
            raise ExecutionRefused("residency", why)

    def _asked(self, method: str, path: str, body: Mapping[str, Any]) -> Floats:
        n_embd = self._weights.architecture.shape.n_embd
        reply = self._call(method, path, body, frame_bytes(1, n_embd))
        frame = told_frame(self._caller, reply)
        if (frame.model, frame.rows.shape) != (self._key, (1, n_embd)):
            raise BackendFailure(f"{self._caller.url}: {frame.rows.shape} where one row of {n_embd} was due")
        return frame.rows

    def _told(self) -> Mapping[str, Any]:
        self._begun()
        reply = self._call("GET", self._path, None, _JSON_BYTES)
        try:
            told: Mapping[str, Any] = json.loads(reply.body)
            return {"memory": told["memory"], "stages": told["stages"]}
        except (ValueError, KeyError, TypeError):
            raise BackendFailure(f"{self._caller.url}: no memory and counters in the answer") from None

    def _call(self, method: str, path: str, body: Mapping[str, Any] | None, due_bytes: int) -> Reply:
        """Raises what the engine at the server raised, beside the errors of `Caller`."""
        data = json.dumps(body).encode() if body is not None else b""
        reply = self._caller.call(method, path, data, SESSION_TYPE, max(due_bytes, _JSON_BYTES))
        if reply.status != 422:
            return reply
        try:
            told = json.loads(reply.body)
            kind, args = told["type"], [str(arg) for arg in told["args"]]
        except (ValueError, KeyError, TypeError):
            raise BackendFailure(f"{self._caller.url}: an error that is none of kvtape's") from None
        if kind == "StateInvalidated":
            self._lost = f"{args[0]} ({self._caller.url})"
            raise StateInvalidated(self._lost)
        if kind == "ExecutionRefused" and args[0] in ("residency", "unsupported", "binding_defect"):
            raise ExecutionRefused(args[0], args[1])  # type: ignore[arg-type]
        raise BackendFailure(f"{self._caller.url}: {told.get('error')}")
