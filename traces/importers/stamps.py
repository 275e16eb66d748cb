"""Wall-clock stamps as exact nanoseconds since 1970."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.source import Source

__all__ = ["WallClock"]

_STAMP = re.compile(
    r"(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d):(\d\d)(?:[.,](\d{1,9})\d*)?\s*(Z|[+-]\d\d:?\d\d)?", re.IGNORECASE
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class WallClock:
    """Reads the stamps of one file: ISO 8601 with a blank or T, any number of fractional digits, with or without zone.

    A stamp without a zone is taken as UTC, and that is noted once.
    """

    def __init__(self, source: Source, notes: Notes) -> None:
        self._source, self._notes = source, notes
        self._minutes: dict[tuple[str, str, str | None], int] = {}

    def unix_ns(self, field: str, text: str) -> int:
        """Nanoseconds since 1970. Raises SourceRejected for anything that is no such stamp."""
        found = _STAMP.fullmatch(text.strip())
        if found is None:
            what = f"{text[:40]!r} is no wall-clock time"
            raise self._source.rejected(field, what, "give it as 2023-11-16 18:15:46.6805900")
        day, minute, second, fraction, zone = found.groups()
        whole = self._minutes.get((day, minute, zone))
        if whole is None:
            whole = self._minute_ns(field, text, day, minute, zone)
            self._minutes[day, minute, zone] = whole
        if int(second) > 60:
            raise self._source.rejected(field, f"{text!r} has {second} seconds", "correct the stamp")
        return whole + int(second) * 1_000_000_000 + int((fraction or "").ljust(9, "0"))

    def _minute_ns(self, field: str, text: str, day: str, minute: str, zone: str | None) -> int:
        try:
            at = datetime.fromisoformat(f"{day}T{minute}+00:00")
        except ValueError as err:
            raise self._source.rejected(field, f"{text!r} is no date ({err})", "correct the stamp") from None
        if zone is None:
            text = "stamps have no time zone: taken as UTC, so only differences between them are certain"
            self._notes.warn("no_time_zone", self._source.name, self._source.line, text)
        elif zone.upper() != "Z":
            sign = 1 if zone[0] == "+" else -1
            digits = zone[1:].replace(":", "")
            at -= sign * timedelta(hours=int(digits[:2]), minutes=int(digits[2:]))
        since = at - _EPOCH
        if since < timedelta(0):
            raise self._source.rejected(field, f"{text!r} is before 1970", "correct the stamp")
        return (since.days * 86_400 + since.seconds) * 1_000_000_000
