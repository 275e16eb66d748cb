"""The one grammar of specs, `name[:key=value[,key=value]*]`, and the typed reading of their options.

An argument part without `=` names a function: `package.module:function[,key=value]*`, or behind a name,
`name:package.module:function`. Names are case-sensitive; whatever is not known is an error that lists what is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NamedTuple

__all__ = [
    "INT_MAX",
    "REQUIRED",
    "Option",
    "OptionValue",
    "Spec",
    "SpecError",
    "choose_name",
    "nearest",
    "parse_options",
    "parse_spec",
]

INT_MAX = 2**31 - 1
"""Largest number an option takes: engines count positions in 32 bits."""

OptionValue = int | float | str | bool | None
_Allowed = tuple[int | float | str | None, ...]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.\-]*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_\-]*")
_FUNCTION = re.compile(r"(?:[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:)?[A-Za-z_]\w*", re.ASCII)
_WHOLE = re.compile(r"[0-9]{1,12}")
_DECIMAL = re.compile(r"-?[0-9]{1,12}(\.[0-9]{1,21})?(e-[0-9]{1,2})?")
_YES_NO = {"yes": True, "no": False, "on": True, "off": False}


class SpecError(ValueError):
    """A spec that is not understood: what is wrong, the nearest name where there is one, and what is allowed."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A parsed spec. `args` in the order written; `target` is `module:function` where the spec names one."""

    name: str
    args: tuple[tuple[str, str], ...] = ()
    target: str | None = None

    def __str__(self) -> str:
        function = [] if self.target is None else [self.target.removeprefix(f"{self.name}:")]
        parts = function + [f"{key}={value}" for key, value in self.args]
        return f"{self.name}:{','.join(parts)}" if parts else self.name


class _Required:
    """The default of an option that has to be given."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = _Required()


class Option(NamedTuple):
    """How to read one option; a plain tuple of the same three does as well.

    `kind` int: whole numbers, `allowed` their (smallest, largest), either None; float: the same of decimal numbers.
    `kind` str: `allowed` lists the words, None for any text. `kind` bool: written yes or no, on or off. A missing
    option whose `default` is REQUIRED is an error.
    """

    kind: type[int | float | str | bool]
    default: OptionValue | _Required = None
    allowed: _Allowed | None = None


def parse_spec(text: str) -> Spec:
    """Raises SpecError for an empty part, a bad name, a key given twice or two functions."""
    name, colon, rest = text.partition(":")
    if not _NAME.fullmatch(name):
        raise SpecError(f"spec {text!r}: {name!r} is no name; write name[:key=value[,key=value]*]")
    if colon and not rest:
        raise SpecError(f"spec {text!r}: nothing behind the colon; write name[:key=value[,key=value]*]")
    args: dict[str, str] = {}
    target: str | None = None
    for part in rest.split(",") if colon else ():
        key, equals, value = part.partition("=")
        if not equals:
            target = _function(text, name, part, target)
            continue
        if not _KEY.fullmatch(key) or not value:
            raise SpecError(f"spec {text!r}: {part!r} is not key=value; write name[:key=value[,key=value]*]")
        if key in args:
            raise SpecError(f"spec {text!r}: {key} is given twice")
        args[key] = value
    return Spec(name, tuple(args.items()), target)


def _function(text: str, name: str, part: str, already: str | None) -> str:
    if not _FUNCTION.fullmatch(part):
        raise SpecError(
            f"spec {text!r}: {part!r} is neither key=value nor module:function; write name[:key=value[,key=value]*]"
        )
    if already is not None:
        raise SpecError(f"spec {text!r}: {part!r} is a second function beside {already}; leave one of them")
    return part if ":" in part else f"{name}:{part}"


def choose_name(what: str, given: str, allowed: Iterable[str], *, also: str | None = None) -> str:
    """`given` if it is allowed. Raises SpecError with the nearest allowed name, the whole list and what is `also`."""
    names = sorted(allowed)
    if given in names:
        return given
    listed = ", ".join([*names, *([f"or {also}"] if also else [])])
    raise SpecError(f"unknown {what} {given!r}{nearest(given, names)} allowed: {listed or 'none'}")


def nearest(given: str, names: Iterable[str]) -> str:
    """What stands behind an unknown name, before the list of `names`: `, did you mean 'llama'?`, or a semicolon."""
    near = get_close_matches(given, list(names), n=1)
    return f", did you mean {near[0]!r}?" if near else ";"


def parse_options(
    spec: Spec,
    table: Mapping[str, Option | tuple[type, OptionValue | _Required, _Allowed | None]],
) -> dict[str, OptionValue]:
    """The value of every option in `table`, in its order, defaults filled in.

    Raises SpecError for an option that is not in the table, a value that does not fit, a missing one.
    """
    if spec.target is not None:
        raise SpecError(f"{spec.name} takes no function ({spec.target}); allowed: {_listed(table)}")
    given = dict(spec.args)
    for key in given:
        choose_name(f"option of {spec.name}", key, table)
    values: dict[str, OptionValue] = {}
    for key, entry in table.items():
        option = Option(*entry)
        if key in given:
            values[key] = _read(f"{spec.name}:{key}={given[key]}", given[key], option)
        elif isinstance(option.default, _Required):
            missing = [k for k, e in table.items() if k not in given and isinstance(Option(*e).default, _Required)]
            raise SpecError(f"{spec.name} needs {' and '.join(f'{k}=' for k in missing)}; allowed: {_listed(table)}")
        else:
            values[key] = option.default
    return values


def _listed(table: Mapping[str, object]) -> str:
    return ", ".join(sorted(table)) or "no options"


def _read(where: str, text: str, option: Option) -> OptionValue:
    if option.kind is bool:
        if text not in _YES_NO:
            raise SpecError(f"{where}: {text!r} is not understood; allowed: {', '.join(_YES_NO)}")
        return _YES_NO[text]
    if option.kind is str:
        if option.allowed is None:
            return text
        words = [str(word) for word in option.allowed]
        if text in words:
            return text
        raise SpecError(f"{where}: unknown value {text!r}{nearest(text, words)} allowed: {', '.join(words)}")
    if option.kind is float:
        return _read_float(where, text, option.allowed or (None, None))
    return _read_int(where, text, option.allowed or (0, None))


def _read_float(where: str, text: str, bounds: _Allowed) -> float:
    low, high = (None if bound is None else float(bound) for bound in bounds)
    value = float(text) if _DECIMAL.fullmatch(text) else None
    if value is None or (low is not None and value < low) or (high is not None and value > high):
        limits = [f"at least {low}"] * (low is not None) + [f"at most {high}"] * (high is not None)
        wanted = " of ".join(["a number", *([" and ".join(limits)] if limits else [])])
        raise SpecError(f"{where}: {text!r} is not allowed; allowed: {wanted}")
    return value


def _read_int(where: str, text: str, bounds: _Allowed) -> int:
    low = int(bounds[0] or 0)
    high = INT_MAX if bounds[1] is None else int(bounds[1])
    if not _WHOLE.fullmatch(text) or not low <= int(text) <= high:
        too_large = text.isdecimal() and int(text[:20]) > high
        most = f" and at most {high}" if bounds[1] is not None or too_large else ""
        raise SpecError(f"{where}: {text!r} is not allowed; allowed: a whole number of at least {low}{most}")
    return int(text)
