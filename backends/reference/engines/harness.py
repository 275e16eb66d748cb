"""One harness for either kind of engine: prompt in, logits out, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvtape.backends.reference.engines.engine import KvEngine, RetrievalEngine
from kvtape.backends.reference.engines.registry import EngineChoice, make_engine
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import served_logits
from kvtape.backends.reference.model.ffn import FfnRouter, LocalFfn
from kvtape.backends.reference.model.weights import Weights

__all__ = ["Harness"]


class Harness:
    """An engine, or the choice of one that is made here, with its weights and its router.

    `router` may be set to another one between any two calls. Every call raises BackendFailure for logits that are not
    finite, beside what the engine raises.
    """

    def __init__(
        self, engine: EngineChoice | KvEngine | RetrievalEngine, weights: Weights, router: FfnRouter | None = None
    ) -> None:
        self.engine: KvEngine | RetrievalEngine = make_engine(engine) if isinstance(engine, EngineChoice) else engine
        self.weights = weights
        self.router: FfnRouter = router or LocalFfn(weights)

    def begin(self, prompt: Sequence[int], context: Sequence[int] = ()) -> Floats:
        """Logits `[n_vocab]` after `context` and `prompt`.

        A retrieval engine adds the context to its store, and answers the prompt from whatever the store holds then.
        """
        engine = self.engine
        if isinstance(engine, KvEngine):
            return self._logits(engine.prefill(self.weights, self.router, [*context, *prompt]))
        if context:
            engine.ingest(self.weights, self.router, context)
        return self._logits(engine.query(self.weights, self.router, prompt))

    def step(self, token: int) -> Floats:
        """Logits `[n_vocab]` after one more token."""
        return self._logits(self.engine.decode_step(self.weights, self.router, token))

    def forced(self, prompt: Sequence[int], tokens: Sequence[int]) -> Iterator[Floats]:
        """Logits `[n_vocab]` before each of `tokens`, each given whatever the logits say: how engines are compared."""
        logits = self.begin(prompt)
        for token in tokens:
            yield logits
            logits = self.step(token)

    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """The `n` tokens behind `prompt`, each the first of the largest logits."""
        out: list[int] = []
        logits = self.begin(prompt)
        while len(out) < n:
            out.append(int(logits.argmax()))
            if len(out) < n:
                logits = self.step(out[-1])
        return out

    def _logits(self, hidden: Floats) -> Floats:
        return served_logits(self.weights, hidden)
