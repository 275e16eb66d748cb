"""A model on OpenVINO: loads a GGUF, or the folder of an OpenVINO model, and opens sessions on it.

NumPy's threads fight OpenVINO's for the cores (an evict of 12 ms took 1400 ms), so importing this module sets
`OPENBLAS_NUM_THREADS=1` unless it is set. That helps only when nothing imported NumPy before; setting the variable
before the process starts always does.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from kvtape.backends.errors import EnvironmentProblem, SessionClosed
from kvtape.backends.fit import check_weights, read_shape
from kvtape.backends.protocol import ModelFacts, SessionConfig
from kvtape.capacity.model import ModelShape

if TYPE_CHECKING:
    from kvtape.backends.openvino.compiled import Compiled, Profile
    from kvtape.backends.openvino.session import OpenVinoBackend

__all__ = ["OpenVinoEngine"]


class OpenVinoEngine:
    """See `protocol.Engine`. Sessions with the same storage types and threads share one compiled model."""

    name = "openvino"

    def __init__(self, model: ModelShape, version: str, options: dict[str, str]) -> None:
        from kvtape.backends.openvino.tokenizer import NativeTokenizer

        self.version = version
        self.facts = ModelFacts(
            model.path, model.fingerprint, model.arch, model.n_vocab, model.n_ctx_train, model.end_tokens
        )
        self._model = model
        self._options = options
        self._tokenizer = NativeTokenizer(Path(model.path), model.tokenizer, model.n_vocab)
        self._compiled: dict[Profile, Compiled] = {}
        self._sessions: weakref.WeakSet[OpenVinoBackend] = weakref.WeakSet()
        self._closed = False

    @classmethod
    def load(cls, path: str | Path, options: Mapping[str, str] | None = None) -> OpenVinoEngine:
        """Open the GGUF or folder `path`; `options` (see `options.OPTIONS`) are the defaults of its sessions.

        Raises UsageError for a model or an option that cannot be used, DoesNotFit for weights without room,
        EnvironmentProblem when OpenVINO is missing or the file needs a switch that is not set.
        """
        try:
            import openvino
        except ImportError as err:
            raise EnvironmentProblem(f"OpenVINO is not installed ({err}); pip install 'kvtape[openvino]'") from None
        model = _usable(path, options or {})
        return cls(model, str(openvino.__version__), dict(options or {}))

    @classmethod
    def check(cls, path: str | Path, config: SessionConfig) -> int:
        """The effective context that a session with `config` would get; reads the header (of a folder: the graph).

        Raises UsageError for what cannot be opened, DoesNotFit for what memory does not hold.
        """
        from kvtape.backends.openvino.graph_source import build_graph
        from kvtape.backends.openvino.options import resolve

        model = _usable(path, config.options)
        n_ctx = resolve(config, {}, model).n_ctx
        if Path(path).is_dir():  # what it is shows in its graph alone
            build_graph(path, n_ctx_train=model.n_ctx_train)
        return n_ctx

    def tokenize(self, text: str) -> list[int]:
        """Ids of plain text, nothing added. Raises InputRejected for text that has a control token written in it."""
        return self._tokenizer.encode(text)

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def open(self, config: SessionConfig) -> OpenVinoBackend:
        """The first session of a profile compiles the model (1 to 2 s on 135M parameters)."""
        from kvtape.backends.openvino.gates import gate
        from kvtape.backends.openvino.options import resolve
        from kvtape.backends.openvino.session import OpenVinoBackend

        if self._closed:
            raise SessionClosed("the engine is closed")
        asked = resolve(config, self._options, self._model, loaded=bool(self._compiled))
        compiled = self._compile(asked.profile)
        why = compiled.rotation if isinstance(compiled.rotation, str) else None
        able = gate(
            mirror=asked.mirror,
            scores=asked.scores,
            cold_budget_tokens=config.cold_budget_tokens,
            no_rotation=why,
            unproven=self._unproven(asked.config),
        )
        backend = OpenVinoBackend(compiled, self.facts, asked, able, self.version)
        self._sessions.add(backend)
        return backend

    def close(self) -> None:
        """Close all sessions and free the compiled models. Idempotent."""
        self._closed = True
        for session in list(self._sessions):
            session.close()
        self._sessions.clear()
        self._compiled.clear()

    def _unproven(self, config: SessionConfig) -> str | None:
        """Why rows of the effective `config` may not be cut or moved. Of the types, u8 alone keeps no row as it is."""
        if "u8" not in (config.kv_type_k, config.kv_type_v) or config.uncertified:
            return None
        from kvtape.backends.proofs.check import precision_problem

        return precision_problem(self.name, self.version, self.facts, config)

    def _compile(self, profile: Profile) -> Compiled:
        from kvtape.backends.openvino.compiled import Compiled

        if profile not in self._compiled:
            compiled = Compiled(Path(self._model.path), self._model, profile)
            if compiled.shape.n_vocab < self.facts.n_vocab:
                raise EnvironmentProblem(
                    f"{self._model.path}: {self.facts.n_vocab} tokens, but logits for {compiled.shape.n_vocab}"
                    "; convert the model again"
                )
            self._compiled[profile] = compiled
        return self._compiled[profile]


def _usable(path: str | Path, options: Mapping[str, str]) -> ModelShape:
    """Raises as `OpenVinoEngine.load` does, but for what only the graph of a folder shows."""
    from kvtape.backends.openvino.gates import check_model
    from kvtape.backends.openvino.options import read_openvino_options, with_trained_context

    asked = read_openvino_options(options)
    model = read_shape(path)
    if not Path(path).is_dir():
        check_model(model)
    model = with_trained_context(model, asked["trained"])
    check_weights(str(path), model.weights_bytes)
    return model
