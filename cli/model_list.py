"""`kvtape models`: the models that speculation may use, by name: explicit, hashed, with a role."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AsJson

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtape.backends.speculation.artifacts import Artifact

__all__ = ["models"]

models = typer.Typer(
    name="models", help="Models by name: file, hash and role.", no_args_is_help=True, rich_markup_mode=None
)

_COLUMNS = ("name", "role", "file", "sha256", "fingerprint", "state")
_Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.", show_default=False)]


@models.command("add")
def add(
    name: _Name,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A GGUF or the folder of an OpenVINO model.", show_default=False)
    ],
    role: Annotated[str, typer.Option("--role", metavar="target|draft", help="What it may be used for.")] = "draft",
    as_json: AsJson = False,
) -> int:
    """Add a model under a name, with the hash of its file."""
    from kvtape.backends.speculation.artifacts import add_artifact

    return _told("models add", [add_artifact(name, file, role)], ["ok"], as_json=as_json)


@models.command("list")
def list_(as_json: AsJson = False) -> int:
    """Every model, as it was added; files are not looked at."""
    from kvtape.backends.speculation.artifacts import artifacts

    return _told("models list", artifacts(), None, as_json=as_json)


@models.command("remove")
def remove(name: _Name, as_json: AsJson = False) -> int:
    """Take a model off the list; its file stays where it is."""
    from kvtape.backends.speculation.artifacts import remove_artifact

    return _told("models remove", [remove_artifact(name)], None, as_json=as_json)


@models.command("verify")
def verify(as_json: AsJson = False) -> int:
    """Whether every file is the one that was added. Exits 1 when one is not."""
    from kvtape.backends.speculation.artifacts import artifacts, state_of

    found = artifacts()
    states: list[str] = [state_of(artifact) for artifact in found]
    _told("models verify", found, states, as_json=as_json)
    return 0 if all(state == "ok" for state in states) else 1


def _told(verb: str, found: Sequence[Artifact], states: Sequence[str] | None, *, as_json: bool) -> int:
    from kvtape.backends.speculation.artifacts import models_path
    from kvtape.cli.output import Section, emit

    rows: list[dict[str, Any]] = [artifact.model_dump() for artifact in found]
    for row, state in zip(rows, states or (), strict=False):
        row["state"] = state
    columns = _COLUMNS if states is not None else _COLUMNS[:-1]
    done = {"models add": "added to ", "models remove": "removed from "}.get(verb)
    title = f"{done or ''}{models_path()}" + ("" if done else f": {len(rows)} model{'' if len(rows) == 1 else 's'}")
    body = {"path": str(models_path()), "models": rows}
    emit(verb, body, [Section(title, columns, [tuple(row[c] for c in columns) for row in rows])], as_json=as_json)
    return 0
