"""Rows of usage counts: what the provider found in its cache, and rows that say one thing twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Request
from kvtape.traces.importers.source import Source

__all__ = ["Counts", "check_reused", "folded"]

Counts = tuple[Any, ...]


def check_reused(source: Source, field: str, reused: int | None, n_tokens: int) -> None:
    """Refuse more cached tokens than the prompt has."""
    if reused is not None and reused > n_tokens:
        what = f"{reused} cached tokens of {n_tokens}"
        raise source.rejected(field, what, "cached tokens are part of the input; correct the row")


def folded(found: Iterable[tuple[Request, Counts]], source: Source, notes: Notes) -> Iterator[Request]:
    """Each request once: one that follows in its session with the same counts is the same usage said again.

    The first one's `detail.repeats` has line and time of the others. Requests without a session never repeat.
    """
    held: dict[str, tuple[Request, Counts, list[list[int]]]] = {}
    for request, counts in found:
        if request.session is None:
            yield request
            continue
        before = held.get(request.session)
        if before is not None and before[1] == counts:
            before[2].append([request.line, request.at_ns])
            notes.folded += 1
            text = "the usage of the row before was repeated: counted once, see detail.repeats"
            notes.warn("repeated_usage", source.name, request.line, text)
            continue
        if before is not None:
            yield _with_repeats(before[0], before[2])
        held[request.session] = (request, counts, [])
    for request, _, repeats in held.values():
        yield _with_repeats(request, repeats)


def _with_repeats(request: Request, repeats: list[list[int]]) -> Request:
    if not repeats:
        return request
    return msgspec.structs.replace(request, detail={**request.detail, "repeats": repeats})
