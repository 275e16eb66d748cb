"""Typed reading of nested JSON objects, for formats whose shape is too loose for one type. Errors name the path."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from kvtape.traces.importers.source import Source
from kvtape.traces.importers.values import count, duration_ns

__all__ = ["Members"]


class Members:
    """An object of the source at `path`. Each getter raises SourceRejected for a value of another kind.

    A member that is null is like one that is not there.
    """

    def __init__(self, source: Source, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise source.rejected(path or None, f"{value!r:.40} is no object", "give a JSON object")
        self._source, self._value, self._path = source, value, path

    def __contains__(self, name: str) -> bool:
        return self._value.get(name) is not None

    def get(self, name: str) -> Any:
        return self._value.get(name)

    def at(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name

    def child(self, name: str) -> Members:
        return Members(self._source, self._value.get(name), self.at(name))

    def children(self, name: str) -> list[Members]:
        """The objects of a list; none where it is not there."""
        found = self._listed(name) if name in self else []
        return [Members(self._source, value, f"{self.at(name)}[{i}]") for i, value in enumerate(found)]

    def whole(self, name: str) -> int:
        """A whole number of 0 or more."""
        found = self.whole_or_none(name)
        if found is None:
            raise self._source.rejected(self.at(name), "is missing", "this format needs it; see docs/importing.md")
        return found

    def whole_or_none(self, name: str) -> int | None:
        value = self._value.get(name)
        if value is None:
            return None
        if type(value) is not int:
            what = f"expected int, got {value!r:.40}"
            raise self._source.rejected(self.at(name), what, "write it as a whole number in digits")
        return count(self._source, self.at(name), value)

    def text_or_none(self, name: str) -> str | None:
        value = self._value.get(name)
        if value is not None and not isinstance(value, str):
            raise self._source.rejected(self.at(name), f"expected str, got {value!r:.40}", "give a text")
        return value or None

    def ns_or_none(self, name: str, unit: int) -> int | None:
        """A time in units of `unit` nanoseconds."""
        value = self._value.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
            raise self._source.rejected(self.at(name), f"expected a number, got {value!r:.40}", "give the time as one")
        return duration_ns(self._source, self.at(name), str(value), unit)

    def ns(self, name: str, unit: int) -> int:
        found = self.ns_or_none(name, unit)
        if found is None:
            raise self._source.rejected(self.at(name), "is missing", "this format needs it; see docs/importing.md")
        return found

    def wholes(self, name: str, most: int) -> list[int]:
        """A list of whole numbers of 0 to `most`."""
        found = self._listed(name)
        for i, value in enumerate(found):
            if type(value) is not int or not 0 <= value <= most:
                where, remedy = f"{self.at(name)}[{i}]", f"ids are whole numbers of 0 to {most}"
                raise self._source.rejected(where, f"{value!r:.40} is no id", remedy)
        return list(found)

    def _listed(self, name: str) -> Sequence[Any]:
        found = self._value.get(name)
        if not isinstance(found, list):
            raise self._source.rejected(self.at(name), f"expected a list, got {found!r:.40}", "give a list")
        return found
