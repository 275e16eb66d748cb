"""Errors across the border: the same class with the same message and fields as in one process.

Errors of kvtape and of Python keep their class. Of any other class only the name is left, in a RuntimeError. The
traceback of the host comes along as a note.
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
    kind = type(error)
    own = _OWN.get(kind.__name__) is kind
    return {
        "class": kind.__name__,
        "own": own,
        "builtin": getattr(builtins, kind.__name__, None) is kind,
        "message": str(error),
        "args": list(error.args) if _sendable(error.args) else [str(error)],
        "fields": {k: v for k, v in vars(error).items() if own and k != _NOTES and _sendable(v)},
        "trace": "".join(traceback.format_exception(error)),
    }


def unpack_error(packed: Any) -> Exception:
    """The error again, ready to be raised. Raises WireError."""
    try:
        error = _rebuild(packed["class"], packed["message"], packed)
        error.add_note(f"in the engine host:\n{packed['trace']}")
    except (AttributeError, KeyError, TypeError) as err:
        raise WireError(f"unreadable error: {err!r}") from None
    return error


def _rebuild(kind: str, message: str, packed: dict[str, Any]) -> Exception:
    if packed["own"]:
        # Past the constructor: its arguments are not those of Exception, and the message is made already.
        own = _OWN[kind]
        error: Exception = own.__new__(own)
        Exception.__init__(error, message)
        vars(error).update(packed["fields"])
        return error
    builtin = getattr(builtins, kind, None) if packed["builtin"] else None
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        return builtin(*packed["args"])
    return RuntimeError(f"{kind}: {message}")


def _sendable(value: object) -> bool:
    try:
        encode(value)
    except Unsendable:
        return False
    return True
