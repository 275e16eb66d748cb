"""`--speculate`: whether decodes look at proposed tokens, and by whom they are proposed."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["Speculate"]

Speculate = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="SPEC",
        help="Decode several proposed tokens a call: lookup[:ngram=3,tokens=8] or draft:model=NAME[,tokens=4].",
        show_default=False,
    ),
]
