"""A GGUF model on the reference, and the sessions opened on it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np

from kvtape.backends.errors import SessionClosed
from kvtape.backends.fit import check_weights, read_shape
from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.session.backend import ReferenceBackend
from kvtape.backends.reference.session.engine_rows import check_carries
from kvtape.backends.reference.session.options import ReferenceOptions, parse_reference_options, resolve
from kvtape.backends.reference.session.text import Text
from kvtape.capacity.model import ModelShape

__all__ = ["ReferenceEngine"]


class ReferenceEngine:
    """See `protocol.Engine`. `options` are defaults for `SessionConfig.options` of every session opened here.

    Sessions of one float type share their weights, which are mapped, and dequantised at their first use.
    """

    name = "reference"

    def __init__(self, shape: ModelShape, options: Mapping[str, str]) -> None:
        self.version = f"kvtape {version('kvtape')}, NumPy {np.__version__}"
        self.facts = ModelFacts(
            shape.path, shape.fingerprint, shape.arch, shape.n_vocab, shape.n_ctx_train, shape.end_tokens
        )
        self._options = dict(options)
        self._text = Text(shape)
        self._weights: dict[tuple[str, bool], Weights] = {}
        self._sessions: weakref.WeakSet[ReferenceBackend] = weakref.WeakSet()
        self._closed = False

    @classmethod
    def load(cls, path: str | Path, options: Mapping[str, str] | None = None) -> ReferenceEngine:
        """Open a model file.

        Raises UsageError for a file that is no model, a model that the decoder does not know or an unknown option,
        DoesNotFit for weights without room.
        """
        asked = _checked(options or {})
        shape = read_shape(path)
        check_weights(str(path), shape.weights_bytes)
        engine = cls(shape, options or {})
        engine._opened(asked)
        return engine

    @classmethod
    def check(cls, path: str | Path, config: SessionConfig) -> int:
        """The effective context that a session with `config` would get; maps the file, computes nothing.

        Raises UsageError for what cannot be opened, DoesNotFit for what memory does not hold.
        """
        asked = _checked(config.options)
        check_weights(str(path), read_shape(path).weights_bytes)
        return resolve(config, asked, Weights(path, asked.dtype, packed=asked.packed)).n_ctx

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added. Raises EnvironmentProblem where no engine lends its tokeniser."""
        self._require_open()
        return self._text.tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        self._require_open()
        return self._text.detokenize(tokens)

    def open(self, config: SessionConfig) -> ReferenceBackend:
        """A session. Raises UsageError for bad sizes or options, DoesNotFit for lack of memory."""
        self._require_open()
        merged = replace(config, options={**self._options, **config.options})
        asked = _checked(merged.options)
        weights = self._opened(asked)
        resolved = resolve(merged, asked, weights, loaded=weights.report().resident_bytes > 0)
        session = ReferenceBackend(weights, self.facts, resolved, self.version)
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Close every session and let the weights go. Idempotent."""
        self._closed = True
        for session in list(self._sessions):
            session.close()
        self._weights.clear()
        self._text.close()

    def _opened(self, asked: ReferenceOptions) -> Weights:
        key = (str(asked.dtype), asked.packed)
        if key not in self._weights:
            self._weights[key] = Weights(self.facts.path, asked.dtype, packed=asked.packed)
        return self._weights[key]

    def _require_open(self) -> None:
        if self._closed:
            raise SessionClosed("the engine was closed")


def _checked(options: Mapping[str, str]) -> ReferenceOptions:
    asked = parse_reference_options(options)
    if asked.engine.spec != "standard":
        check_carries(asked.engine)
    return asked
