"""Errors across the border: the same class with the same message and fields as in one process.

Errors of kvtape and of Python keep their class; another one becomes the nearest of those that it derives from, or a
RuntimeError with its name. The traceback of the host comes along as a note.
"""

from __future__ import annotations

import builtins
import traceback
from typing import Any, Final

from kvtape.backends import errors
from kvtape.backends.isolated.values import Unsendable, WireError, encode

__all__ = ["pack_error", "unpack_error"]

_OWN: Final[dict[str, type[errors.KvtapeError]]] = {
    name: cls for name in errors.__all__ if issubclass(cls := getattr(errors, name), errors.KvtapeError)
}
_NOTES: Final = "__notes__"


def pack_error(error: BaseException) -> dict[str, Any]:
    """`error` as a value that can be sent."""
    kind = next((k for k in type(error).__mro__ if _is_known(k)), Exception)
    own = kind.__name__ in _OWN
    fields = {k: v for k, v in vars(error).items() if k != _NOTES and _sendable(v)} if own else {}
    return {
        "class": kind.__name__,
        "message": str(error) if kind is not Exception else f"{type(error).__name__}: {error}",
        "args": list(error.args) if kind is type(error) and _sendable(error.args) else [str(error)],
        "fields": fields,
        "trace": "".join(traceback.format_exception(error)),
    }


def unpack_error(packed: Any) -> Exception:
    """The error again, ready to be raised. Raises WireError."""
    try:
        error = _rebuild(packed["class"], packed)
        error.add_note(f"in the engine host:\n{packed['trace']}")
    except Exception as err:  # damage may break any step
        raise WireError(f"unreadable error: {err!r}") from None
    return error


def _rebuild(kind: str, packed: dict[str, Any]) -> Exception:
    if kind in _OWN:
        # Past the constructor: its arguments are not those of Exception, and the message is made already.
        error: Exception = _OWN[kind].__new__(_OWN[kind])
        Exception.__init__(error, packed["message"])
        vars(error).update(packed["fields"])
        return error
    builtin = getattr(builtins, kind)
    if builtin is Exception:
        return RuntimeError(packed["message"])
    if not issubclass(builtin, Exception):
        raise ValueError(kind)
    rebuilt: Exception = builtin(*packed["args"])
    return rebuilt


def _is_known(kind: type) -> bool:
    return _OWN.get(kind.__name__) is kind or getattr(builtins, kind.__name__, None) is kind


def _sendable(value: object) -> bool:
    try:
        encode(value)
    except Unsendable:
        return False
    return True
