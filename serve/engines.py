"""One loaded engine for the sessions of a server and for its prompts, whatever happens to a session's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtape.backends.errors import EngineFault
from kvtape.backends.isolated.engine import IsolatedEngine
from kvtape.backends.lent import LentEngine
from kvtape.backends.protocol import Backend, Engine, ModelFacts, SessionConfig
from kvtape.serve.requests import EngineGone

__all__ = ["SharedEngine"]


class SharedEngine:
    """Opened at once with `open_engine`.

    `outlives`: it recovers by itself from a lost device (an engine in a host process does). Where it does not, one
    whose device is lost is replaced when a slot is next filled.
    """

    def __init__(self, open_engine: Callable[[], Engine], *, outlives: bool) -> None:
        self._open_engine = open_engine
        self._outlives = outlives
        self._engine = open_engine()
        self._lent = False

    @property
    def facts(self) -> ModelFacts:
        return self._engine.facts

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def version(self) -> str:
        return self._engine.version

    def load(self, model: str) -> Engine:
        """For a pool (`backends.engine_shelf.LoadEngine`); the pool may close what it gets, this engine stays.

        The pool shares one loan and takes another only after it lost the device, so a second loan is that of a new
        engine.
        """
        if self._lent and not self._outlives:
            self._engine.close()
            self._engine = self._open_engine()
        self._lent = True
        return LentEngine(self._engine)

    def open(self, config: SessionConfig) -> Backend:
        """A context beside the pool's, to look at what it can do. Raises what the engine raises."""
        return self._engine.open(config)

    def tokenize(self, text: str) -> list[int]:
        """Raises what the engine raises for a text, EngineGone while its device is lost."""
        try:
            return self._engine.tokenize(text)
        except EngineFault:
            raise EngineGone("the engine failed while the prompt was read; send it again") from None

    def detokenize(self, tokens: Sequence[int]) -> str:
        return self._engine.detokenize(tokens)

    def abandon(self) -> None:
        """End what it computes, however it hangs; only an engine in a host process can be ended so."""
        if isinstance(self._engine, IsolatedEngine):
            self._engine.abandon()

    def close(self) -> None:
        """Free the model; the pool must be closed before. Idempotent."""
        self._engine.close()
