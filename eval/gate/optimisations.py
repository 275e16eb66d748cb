"""The optimisations that the gate knows, by the text of `--cell`."""

from __future__ import annotations

from kvtape.backends.errors import UsageError
from kvtape.backends.speculation.artifacts import artifact_named
from kvtape.backends.speculation.spec import SPECULATIONS, OpenEngine, parse_speculation
from kvtape.eval.gate.cells import Optimisation
from kvtape.planner.grammar import parse_spec

__all__ = ["DEFERRED_PREFILL", "optimisation_named", "speculation_gate_name"]

DEFERRED_PREFILL = Optimisation("deferred-prefill", ("deferred_prefill_calls",), {"defer_prefill": True})


def optimisation_named(text: str, opener: OpenEngine) -> Optimisation:
    """`deferred-prefill`, `lookup[:...]`, `draft:NAME[,...]`; `opener` loads draft models.

    Raises UsageError, SpecError for a text that names none, or a draft model that is not registered as it is.
    """
    if text == DEFERRED_PREFILL.name:
        return DEFERRED_PREFILL
    if text.partition(":")[0] not in SPECULATIONS:
        raise UsageError(f"--cell {text}: choose one of {DEFERRED_PREFILL.name}, lookup[:...], draft:NAME[,...]")
    speculation = parse_speculation(_named(text), opener)
    return Optimisation(speculation_gate_name(speculation.spec), ("drafted_tokens",), {"speculation": speculation})


def speculation_gate_name(spec: str) -> str:
    """What rows of the gate call a canonical spec: of a draft model also which file it was.

    A name that stands for another file today has no row. Raises UsageError for a model that is not there or changed.
    """
    parsed = parse_spec(spec)
    if parsed.name != "draft":
        return spec
    return f"{spec},file={artifact_named(dict(parsed.args)['model'], 'draft').sha256[:12]}"


def _named(text: str) -> str:
    """`draft:NAME,...` is short for `draft:model=NAME,...`."""
    name, _, rest = text.partition(":")
    return f"{name}:model={rest}" if name == "draft" and "=" not in rest.partition(",")[0] else text
