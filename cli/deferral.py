"""`--defer-prefill`: whether prompts wait for the decode that needs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvtape.backends.protocol import Backend

__all__ = ["DeferPrefill", "check_choice", "defers"]

DeferPrefill = Annotated[
    str,
    typer.Option(
        "--defer-prefill",
        metavar="on|off|auto",
        help="Compute prompts with the next decode; auto: where a row of kvtape gate says that it pays.",
    ),
]


def check_choice(choice: str) -> None:
    """Raises UsageError for a choice that is none."""
    from kvtape.backends.errors import UsageError

    if choice not in ("on", "off", "auto"):
        raise UsageError(f"--defer-prefill {choice}: choose on, off or auto")


def defers(choice: str, kv: Backend, *, chat: bool) -> bool:
    """Whether a session on `kv` defers its prefill. `auto` off says why on stderr.

    The gate measures chats: one text is one prompt, and leaves nothing to be computed together.
    """
    from kvtape.backends.proofs.gates import gate_problem
    from kvtape.cli.output import note

    if choice != "auto":
        return choice == "on"
    problem: str | None = "--text has one prompt, and nothing to compute it together with"
    if chat:
        problem = gate_problem("deferred-prefill", kv.name, kv.engine_version, kv.facts, kv.config)
    if problem is not None:
        note(f"kvtape: deferred prefill is off: {problem}")
    return problem is None
