"""Proof rows of options as the rows of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvtape.eval.batching.proofs import Proof, Works, verdicts

__all__ = ["option_rows", "option_verdicts"]


def option_rows(proofs: Sequence[Proof]) -> list[dict[str, Any]]:
    """`works`: true, false, or error; `limit` in nats, on `max_difference` where `exact`, else on `excess`."""
    return [
        {
            "option": proof.case.option,
            "setting": proof.case.setting,
            "exact": proof.case.exact,
            "works": _works(proof.works),
            "why": proof.why,
            "n": proof.n,
            "max_difference": _rounded(proof.max_difference),
            "excess": _rounded(proof.excess),
            "ids_equal": proof.ids_equal,
            "repeatable": proof.repeatable,
            "limit": proof.limit,
        }
        for proof in proofs
    ]


def option_verdicts(proofs: Sequence[Proof]) -> dict[str, bool | str]:
    """Of each option, `works` as in the rows."""
    return {option: _works(works) for option, works in verdicts(proofs).items()}


def _works(works: Works) -> bool | str:
    return works if works == "error" else works == "true"


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
