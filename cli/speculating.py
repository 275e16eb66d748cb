"""`--speculate`: whether decodes look at proposed tokens, and by whom they are proposed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtape.backends.protocol import Backend

__all__ = ["Speculate", "tell_gate"]

Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="SPEC",
        help="Decode several proposed tokens a call: lookup[:ngram=3,tokens=8] or draft:model=NAME[,tokens=4].",
        show_default=False,
    ),
]


def tell_gate(spec: str, kv: Backend) -> None:
    """Say on stderr where the gate has not let it through here. It runs all the same: it was asked for."""
    from kvtape.backends.proofs.gates import gate_problem
    from kvtape.cli.output import note
    from kvtape.eval.gate.optimisations import speculation_gate_name

    problem = gate_problem(speculation_gate_name(spec), kv.name, kv.engine_version, kv.facts, kv.config)
    if problem is not None:
        note(f"kvtape: speculation is on, as asked; whether it pays: {problem}")
