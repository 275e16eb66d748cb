"""A function or class of the user's own, named `module:name` in a spec."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvtape.planner.grammar import SpecError

__all__ = ["load_named"]


def load_named(target: str, what: str) -> Callable[..., Any]:
    """What `module:name` names; `what` it is, for errors. Raises SpecError when it is not there or does not import."""
    module, _, name = target.partition(":")
    try:
        found: Any = getattr(import_module(module), name, None)
    except ModuleNotFoundError as err:
        hint = "put its folder on PYTHONPATH" if err.name and module.startswith(err.name) else "it is imported there"
        raise SpecError(f"policy {target!r}: no module {err.name!r}; {hint}") from err
    except (Exception, SystemExit) as err:
        why = f"{type(err).__name__}: {err}"
        raise SpecError(
            f'policy {target!r}: importing {module!r} failed: {why}; mend it; python -c "import {module}" shows where'
        ) from err
    if not callable(found):
        raise SpecError(f"policy {target!r}: module {module!r} has no {what} {name!r}")
    named: Callable[..., Any] = found
    return named
