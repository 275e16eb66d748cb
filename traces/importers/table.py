"""CSV with a header: columns by name, wherever they stand."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence

from kvtape.traces.importers.source import Source

__all__ = ["csv_header", "csv_rows"]


def csv_header(head: bytes) -> list[str]:
    """The names on the first line of a file, none where that is no text."""
    try:
        first = head.removeprefix(b"\xef\xbb\xbf").split(b"\n", 1)[0].decode("utf-8")
    except UnicodeDecodeError:
        return []
    return [name.strip() for name in next(csv.reader([first]), [])]


def csv_rows(
    source: Source, needed: Sequence[str], optional: Sequence[str] = (), *, drop_repeated: bool = False
) -> Iterator[list[str]]:
    """Each row's cells of the columns `needed`, then of `optional` ("" where the file has no such column).

    Raises SourceRejected for a missing or repeated column and for a row of another width.
    """
    rows = csv.reader(source.text_lines(drop_repeated=drop_repeated), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        for name in needed:
            if header.count(name) != 1:
                what = "no such column" if name not in header else "the column is there twice"
                remedy = f"the header needs {', '.join(needed)}; it has {', '.join(header)[:200] or 'nothing'}"
                raise source.rejected(name, what, remedy)
        width = len(header)
        places = [header.index(name) if name in header else width for name in (*needed, *optional)]
        for cells in rows:
            if len(cells) != width:
                raise source.rejected(None, f"{len(cells)} cells, the header has {width}", "correct the row")
            cells.append("")
            yield [cells[i] for i in places]
    except csv.Error as err:
        raise source.rejected(None, f"not CSV, {err}", "correct the row") from None
