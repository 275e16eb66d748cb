"""`--print-config` and `--config F`: everything a verb was asked, as a JSON file, and back; flags = file.

The file holds `verb` and `options`, by the names that the options have on the line without their dashes; arguments have
the names that the verb's usage shows them by, in lower case. A flag on the line goes before the file. Paths in a file
are those of the folder in which the verb runs, as on the line.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from typing import NoReturn

__all__ = ["configured", "file_of"]

_SCHEMA = "kvtape.config/1"
_ENVELOPE = ("digest", "digest_kind", "kvtape_version", "schema", "verb")
_OWN = ("config", "print_config", "help")
_FILE = "kvtape.config_file"


def _take_file(context: typer.Context, path: str | None) -> str | None:
    """The file's options stand in for the defaults; `--config` is read before every other option."""
    if path is None or context.resilient_parsing:
        return path
    known = _parameters(context)
    options = _read_config(path, str(context.info_name), known)
    given = {known[name].name: value for name, value in options.items() if value is not None}
    context.default_map = {parameter: _as_on_the_line(value) for parameter, value in given.items()}
    context.meta[_FILE] = "stdin" if path == "-" else path
    return path


_Config = Annotated[
    str | None,
    typer.Option(
        "--config",
        metavar="F.json",
        is_eager=True,
        callback=_take_file,
        help="Options from a file that --print-config wrote; the line goes before it; - for stdin.",
    ),
]
_PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print as JSON what would run, for --config, and do nothing.")
]


def configured(verb: Callable[..., Any]) -> Callable[..., Any]:
    """The same command with the two options."""

    @functools.wraps(verb)
    def run(context: typer.Context, config: str | None, print_config: bool, **given: Any) -> Any:
        names = {str(parameter.name): name for name, parameter in _parameters(context).items()}
        _finite(context, names, given)
        if not print_config:
            return verb(**given)
        from kvtape.cli.output import emit

        options = {names[parameter]: _plain(value) for parameter, value in given.items()}
        emit("config", {"verb": context.info_name, "options": options}, [], as_json=True)
        return 0

    signature = inspect.signature(verb, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("context", keyword, annotation=typer.Context),
        *(p.replace(kind=keyword) for p in signature.parameters.values()),
        inspect.Parameter("config", keyword, default=None, annotation=_Config),
        inspect.Parameter("print_config", keyword, default=False, annotation=_PrintConfig),
    ]
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": signature.return_annotation}
    return run


def file_of(context: Any, parameter: str | None) -> str | None:
    """The file that the value of a parameter came from; None for one that was on the line or has its default."""
    if parameter is None or context is None:
        return None
    source = context.get_parameter_source(parameter)
    return context.meta.get(_FILE) if source is not None and source.name == "DEFAULT_MAP" else None


def _read_config(path: str, verb: str, known: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a file, or of stdin for `-`, by their names on the line.

    `known`: the parameter of each option that `verb` has. Raises UsageError for what is no such file, or one of another
    verb, an unknown or repeated key, or a value that its parameter does not take; OSError.
    """
    where = "stdin" if path == "-" else path

    def wrong(what: str) -> NoReturn:
        from kvtape.backends.errors import UsageError

        raise UsageError(f"{where}: {what}; kvtape {verb} --print-config shows the form")

    try:
        data = json.loads(_read(path), object_pairs_hook=_once)
    except (ValueError, RecursionError) as err:
        wrong(f"no JSON of a configuration ({err})")
    if not isinstance(data, dict) or not isinstance(data.get("options"), dict):
        wrong("no configuration: options are missing")
    _known(where, "key", data, ["options", *_ENVELOPE])
    if data.get("schema", _SCHEMA) != _SCHEMA:
        wrong(f"schema is {data['schema']!r}, this kvtape reads {_SCHEMA}")
    if data.get("verb", verb) != verb:
        wrong(f"it is a configuration of kvtape {data['verb']}, not of kvtape {verb}")
    options: dict[str, Any] = data["options"]
    _known(where, f"option of kvtape {verb}", options, known)
    for name, value in options.items():
        fits, wanted = _fits(known[name], value)
        if value is not None and not fits:
            wrong(f"options.{name} is to be {wanted}")
    return options


def _fits(parameter: Any, value: Any) -> tuple[bool, str]:
    """Whether a parameter takes a value of the file, and what it takes."""
    if getattr(parameter, "is_flag", False):
        return isinstance(value, bool), "true or false"
    if getattr(parameter, "multiple", False) or parameter.nargs != 1:
        return isinstance(value, list) and all(map(_is_scalar, value)), "a list of texts or numbers"
    return _is_scalar(value), "one text or number"


def _read(path: str) -> str:
    """Raises UsageError for a path that is no file, InputRejected for what is not UTF-8, OSError."""
    from kvtape.backends.errors import UsageError
    from kvtape.cli.prompts import read_file

    if not path:
        raise UsageError("--config: the name is empty; give a file that --print-config wrote, or - for stdin")
    return read_file(path, "a file that --print-config wrote")


def _is_scalar(value: Any) -> bool:
    """A text or number that a command line can hold."""
    if isinstance(value, str):
        return not any("\ud800" <= c <= "\udfff" or c == "\0" for c in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_on_the_line(value: Any) -> Any:
    """Numbers as text, for the parser to read as it reads the line; flags as they are."""
    if isinstance(value, list):
        return [_as_on_the_line(each) for each in value]
    return value if isinstance(value, bool) else str(value)


def _finite(context: typer.Context, names: Mapping[str, str], given: Mapping[str, Any]) -> None:
    """Raises UsageError for an option that is not a number or endless, which no verb can count with."""
    for parameter, value in given.items():
        if isinstance(value, float) and not math.isfinite(value):
            from kvtape.backends.errors import UsageError

            file = file_of(context, parameter)
            where = "" if file is None else f"{file}: "
            raise UsageError(f"{where}--{names[parameter]} {value}: give a finite number, or leave the option away")


def _known(where: str, what: str, given: Mapping[str, Any], allowed: Any) -> None:
    """Raises SpecError with the nearest name for a key that is not allowed."""
    from kvtape.planner.grammar import choose_name

    for key in given:
        choose_name(f"{what} in {where}:", key, allowed)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, _ in pairs if sum(other == key for other, _ in pairs) > 1)
        raise ValueError(f"{twice} is there twice")
    return found


def _parameters(context: typer.Context) -> dict[str, Any]:
    """Each by the name that people know it by: `--n-ctx` is n-ctx, the argument LOG is log."""
    return {
        max(p.opts, key=len).removeprefix("--") if p.param_type_name == "option" else str(p.name): p
        for p in context.command.params
        if p.name not in _OWN
    }


def _plain(value: Any) -> Any:
    """A value as JSON has it."""
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value
