"""A GGUF model in llama.cpp, and the sessions opened on it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvtape.backends.asked import CONTEXT_PADDING
from kvtape.backends.errors import EnvironmentProblem, SessionClosed
from kvtape.backends.fit import check_weights, read_shape
from kvtape.backends.llama.native import NativeModel, library
from kvtape.backends.llama.options import context_params, parse_llama_options
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.capacity.model import ModelShape

__all__ = ["LlamaEngine"]


class LlamaEngine:
    """`options` are defaults for `SessionConfig.options` of every session opened here."""

    name = "llama"

    def __init__(self, model: NativeModel, shape: ModelShape, options: Mapping[str, str]) -> None:
        self.version = f"llama-cpp-python {library().__version__}"
        self.facts = ModelFacts(
            path=shape.path,
            fingerprint=shape.fingerprint,
            arch=shape.arch,
            n_vocab=model.n_vocab,
            n_ctx_train=model.n_ctx_train,
            end_tokens=model.end_tokens(),
        )
        self._model = model
        self._shape = shape
        self._options = dict(options)
        self._sessions: weakref.WeakSet[LlamaBackend] = weakref.WeakSet()
        self._closed = False

    @classmethod
    def load(cls, path: str | Path, options: Mapping[str, str] | None = None) -> LlamaEngine:
        """Load a model file.

        Raises UsageError for a file that is no model or an unknown option, DoesNotFit for weights without room,
        EnvironmentProblem when llama.cpp is missing or cannot load the file.
        """
        parse_llama_options(options or {})
        shape = read_shape(path)
        check_weights(str(path), shape.weights_bytes)
        model = NativeModel(str(path))
        if model.has_encoder:
            model.close()
            raise EnvironmentProblem(f"{path}: encoder models have no KV cache to record")
        return cls(model, shape, options or {})

    @classmethod
    def check(cls, path: str | Path, config: SessionConfig) -> int:
        """The effective context that a session with `config` would get; reads the header, loads nothing.

        Raises UsageError for what cannot be opened, DoesNotFit for what memory does not hold.
        """
        shape = read_shape(path)
        check_weights(str(path), shape.weights_bytes)
        return context_params(config, parse_llama_options(config.options), shape).n_ctx - CONTEXT_PADDING

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text, nothing added. Raises InputRejected for text that is not valid Unicode."""
        self._require_open()
        return self._model.tokenize(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Text of tokens, special ones spelled out. Raises InputRejected for an id outside the vocabulary."""
        self._require_open()
        return self._model.detokenize(tokens)

    def open(self, config: SessionConfig) -> LlamaBackend:
        """A session with its own context. Raises UsageError for bad sizes, EnvironmentProblem if the engine refuses."""
        self._require_open()
        merged = replace(config, options={**self._options, **config.options})
        session = LlamaBackend(self._model, self._shape, self.facts, merged, self.version)
        self._sessions.add(session)
        return session

    def close(self) -> None:
        """Close every session, then free the model. Idempotent."""
        for session in list(self._sessions):
            session.close()
        self._model.close()
        self._closed = True

    def _require_open(self) -> None:
        if self._closed:
            raise SessionClosed("the engine was closed")
