"""What an import has to say about its source without refusing it: counted by kind, with the first line of each."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Notes", "Warned"]


@dataclass(frozen=True, slots=True)
class Warned:
    """`kind` is a stable word for scripts, `text` a sentence for people, `line` where it was first seen."""

    kind: str
    count: int
    file: str
    line: int | None
    text: str


class Notes:
    """Collects warnings. One kind is one entry for each file, however often it comes."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], Warned] = {}
        self.folded = 0
        """Source rows that are in the log as part of the row before them, by a rule of their format."""

    def warn(self, kind: str, file: str, line: int | None, text: str, count: int = 1) -> None:
        known = self._found.get((kind, file))
        if known is None:
            self._found[kind, file] = Warned(kind, count, file, line, text)
        else:
            self._found[kind, file] = Warned(kind, known.count + count, file, known.line, known.text)

    def count(self, kind: str) -> int:
        return sum(w.count for w in self._found.values() if w.kind == kind)

    def warnings(self) -> list[Warned]:
        """In the order in which they were first seen."""
        return list(self._found.values())
