"""The optimisations that the gate knows, by the text of `--cell`."""

from __future__ import annotations

from kvtape.backends.errors import UsageError
from kvtape.eval.gate.cells import Optimisation

__all__ = ["DEFERRED_PREFILL", "optimisation_named"]

DEFERRED_PREFILL = Optimisation("deferred-prefill", ("deferred_prefill_calls",), lambda: {"defer_prefill": True})


def optimisation_named(text: str) -> Optimisation:
    """Raises UsageError for a text that names none."""
    if text == DEFERRED_PREFILL.name:
        return DEFERRED_PREFILL
    raise UsageError(f"--cell {text}: choose one of {DEFERRED_PREFILL.name}")
