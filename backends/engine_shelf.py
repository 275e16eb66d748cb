"""Loaded engines, shared by whoever uses the same model; closed when the last user gives one back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from kvtape.backends.protocol import Engine

__all__ = ["EngineShelf", "LoadEngine"]

LoadEngine = Callable[[str], Engine]
"""Loads the model that a name stands for."""


@dataclass(slots=True)
class _Loan:
    engine: Engine
    users: int


class EngineShelf:
    """Engines by model name. One load at a time, so that two users of a model never load it twice."""

    def __init__(self, load: LoadEngine) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._shelf: dict[str, _Loan] = {}
        self._loans: list[_Loan] = []

    def take(self, model: str) -> Engine:
        """The engine of `model`, loaded when nobody uses it yet. Raises what loading raises."""
        with self._lock:
            if model not in self._shelf:
                self._shelf[model] = _Loan(self._load(model), 0)
                self._loans.append(self._shelf[model])
            loan = self._shelf[model]
            loan.users += 1
            return loan.engine

    def give_back(self, engine: Engine) -> None:
        """One user less; the last one closes it."""
        with self._lock:
            loan = next(loan for loan in self._loans if loan.engine is engine)
            loan.users -= 1
            if loan.users:
                return
            self._loans.remove(loan)
            self._forget(engine)
        engine.close()

    def condemn(self, engine: Engine) -> None:
        """Nobody takes this engine any more: its device is gone. Those who have it give it back in their own time."""
        with self._lock:
            self._forget(engine)

    def _forget(self, engine: Engine) -> None:
        self._shelf = {name: loan for name, loan in self._shelf.items() if loan.engine is not engine}
