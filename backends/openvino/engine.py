"""A GGUF model on OpenVINO: loads the file, opens sessions on it.

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
        from kvtape.backends.openvino.tokenizer import GgufTokenizer

        self.version = version
        self.facts = ModelFacts(
            model.path, model.fingerprint, model.arch, model.n_vocab, model.n_ctx_train, model.end_tokens
        )
        self._model = model
        self._options = options
        self._tokenizer = GgufTokenizer(Path(model.path), model.tokenizer, model.n_vocab)
        self._compiled: dict[Profile, Compiled] = {}
        self._sessions: weakref.WeakSet[OpenVinoBackend] = weakref.WeakSet()
        self._closed = False

    @classmethod
    def load(cls, path: str | Path, options: Mapping[str, str] | None = None) -> OpenVinoEngine:
        """Open the GGUF at `path`; `options` (see `options.OPTIONS`) are the defaults of its sessions.

        Raises UsageError for a file or an option that cannot be used, DoesNotFit for weights without room,
        EnvironmentProblem when OpenVINO is missing or the file needs a switch that is not set.
        """
        try:
            import openvino

            from kvtape.backends.openvino.gates import check_model
            from kvtape.backends.openvino.options import read_openvino_options
        except ImportError as err:
            raise EnvironmentProblem(f"OpenVINO is not installed ({err}); pip install 'kvtape[openvino]'") from None
        read_openvino_options(options or {})
        model = read_shape(path)
        check_model(model)
        check_weights(str(path), model.weights_bytes)
        return cls(model, str(openvino.__version__), dict(options or {}))

    @classmethod
    def check(cls, path: str | Path, config: SessionConfig) -> int:
        """The effective context that a session with `config` would get; reads the header, loads no model.

        Raises UsageError for what cannot be opened, DoesNotFit for what memory does not hold.
        """
        from kvtape.backends.openvino.gates import check_model
        from kvtape.backends.openvino.options import resolve

        model = read_shape(path)
        check_model(model)
        check_weights(str(path), model.weights_bytes)
        return resolve(config, {}, model).n_ctx

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

    def _compile(self, profile: Profile) -> Compiled:
        from kvtape.backends.openvino.compiled import Compiled

        if profile not in self._compiled:
            compiled = Compiled(Path(self._model.path), self._model, profile)
            if compiled.shape.n_vocab < self.facts.n_vocab:
                raise EnvironmentProblem(
                    f"{self._model.path}: {self.facts.n_vocab} tokens, but logits for {compiled.shape.n_vocab}"
                )
            self._compiled[profile] = compiled
        return self._compiled[profile]
