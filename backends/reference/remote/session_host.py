"""Sessions that a server holds for clients: the other end of `RemoteEngine`.

A client names its session. Beginning one is putting it there, so it may be repeated; a step says how many tokens it
stands behind, so a repeated one is answered as before and computed once. `MAX_SESSIONS` are held; one more takes the
place of the one that was silent longest, whose client is told at its next call.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from kvtape.backends.errors import KvtapeError, UsageError
from kvtape.backends.reference.engines.boundary_kv import BoundaryKvEngine
from kvtape.backends.reference.engines.engine import KvEngine
from kvtape.backends.reference.engines.registry import make_engine, parse_engine
from kvtape.backends.reference.errors import ExecutionRefused, StateInvalidated
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.weights import Weights

__all__ = ["MAX_SESSIONS", "SessionHost", "problem"]

MAX_SESSIONS: Final = 8


@dataclass(slots=True)
class _Held:
    """`n_tokens` behind which `hidden` `[1, n_embd]` stands; the last of them was `token`."""

    engine: KvEngine
    n_tokens: int
    token: int
    hidden: Floats


class SessionHost:
    """One call at a time. Feed-forward layers are this process's own: rows and layers stay together."""

    def __init__(self, weights: Weights) -> None:
        self._weights, self._ffn = weights, LocalFfn(weights)
        self._held: OrderedDict[str, _Held] = OrderedDict()

    def begin(self, name: str, asked: Any) -> Floats:
        """`asked`: `{"spec", "tokens"}`. The last row `[1, n_embd]`. Raises KvtapeError; then nothing has changed."""
        tokens = _tokens(asked)
        engine = make_engine(parse_engine(str(asked.get("spec"))))
        if not isinstance(engine, KvEngine):
            raise ExecutionRefused("unsupported", f"{engine.info.name} is no KV engine; a server holds only those")
        if isinstance(engine, BoundaryKvEngine):
            raise ExecutionRefused("unsupported", f"{engine.info.name}: nobody takes frames at a server; use standard")
        self._check_length(len(tokens))
        hidden = engine.prefill(self._weights, self._ffn, tokens)
        self._held.pop(name, None)
        while len(self._held) >= MAX_SESSIONS:
            self._held.popitem(last=False)
        self._held[name] = _Held(engine, len(tokens), int(tokens[-1]), hidden)
        return hidden

    def step(self, name: str, asked: Any) -> Floats:
        """`asked`: `{"tokens": [one], "n_tokens"}`, the number before it. Raises KvtapeError."""
        held, tokens = self._session(name), _tokens(asked)
        before, token = asked.get("n_tokens"), int(tokens[0])
        if (before, token) == (held.n_tokens - 1, held.token):
            return held.hidden
        if before != held.n_tokens or len(tokens) != 1:
            raise StateInvalidated(f"the session stands behind {held.n_tokens} tokens, the client behind {before}")
        self._check_length(held.n_tokens + 1)
        held.hidden = held.engine.decode_step(self._weights, self._ffn, token)
        held.n_tokens, held.token = held.n_tokens + 1, token
        return held.hidden

    def told(self, name: str) -> Mapping[str, Any]:
        """Memory and counters, as JSON has them."""
        engine = self._session(name).engine
        return {
            "memory": asdict(engine.memory()),
            "stages": dict(engine.stage_summary()),
            "window_tokens": engine.window_tokens,
        }

    def row(self, name: str, layer: int, position: int) -> tuple[Floats, Floats] | None:
        """Raises IndexError, as the engine."""
        return self._session(name).engine.read_kv_row(layer, position)

    def end(self, name: str) -> None:
        self._held.pop(name, None)

    def _check_length(self, n_tokens: int) -> None:
        n_ctx = self._weights.architecture.shape.n_ctx_train
        if n_tokens > n_ctx:
            raise UsageError(f"{n_tokens} tokens for a model trained for {n_ctx}; send fewer")

    def _session(self, name: str) -> _Held:
        if name not in self._held:
            raise StateInvalidated("the server does not hold the session (any more)")
        self._held.move_to_end(name)
        return self._held[name]


def problem(err: KvtapeError) -> bytes:
    """An error as JSON: enough for the client to raise it again."""
    more = {"ExecutionRefused": ("kind", "why"), "StateInvalidated": ("cause",)}.get(type(err).__name__, ())
    said = {"error": str(err), "type": type(err).__name__, "args": [getattr(err, name) for name in more]}
    return json.dumps(said).encode()


def _tokens(asked: Any) -> list[int]:
    tokens = asked.get("tokens") if isinstance(asked, dict) else None
    if not isinstance(tokens, list) or not tokens or any(type(token) is not int for token in tokens):
        raise UsageError("send an object with tokens, a list of whole numbers")
    return tokens
