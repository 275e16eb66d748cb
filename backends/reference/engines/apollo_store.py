"""What `apollo` retrieves from: windows of past tokens, routed by tf-idf, and entries that say what followed what.

Terms are token ids. With N windows, df(t) of which hold t: `idf(t) = ln(1 + N / df(t))`. A question is routed to the
window with the largest sum of `(1 + ln tf) * idf` over its distinct tokens (Salton and Buckley 1988), the earliest of
equals. An entry is a pair within a window: a term, and a token at most `REACH` places behind it. What an entry is worth
to a question that has the term and not the token is `idf(term) * idf(token) / distance`; what a token is worth is the
sum over its entries of the place where that is largest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.errors import RetrievalMiss
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.tokens import Ids

__all__ = ["REACH", "WINDOW_TOKENS", "ApolloStore", "Retrieved", "StoredWindow", "entries_of"]

WINDOW_TOKENS: Final = 128
REACH: Final = 8

_ENTRY: Final = np.dtype([("term", "<i4"), ("token", "<i4"), ("place", "<i4"), ("distance", "<i4")])
Entries = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class StoredWindow:
    """`boundary` `[n_embd]`: the row of the last token where it enters the injection layer."""

    tokens: Ids
    boundary: Floats
    entries: Entries


class Retrieved(NamedTuple):
    """Of one window: tokens, the most worth first, and their `shares`, which add up to 1."""

    window: int
    tokens: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]


def entries_of(tokens: Ids) -> Entries:
    """All pairs of a window."""
    parts = []
    for distance in range(1, min(REACH, len(tokens) - 1) + 1):
        part = np.empty(len(tokens) - distance, _ENTRY)
        part["term"], part["token"] = tokens[:-distance], tokens[distance:]
        part["place"], part["distance"] = np.arange(distance, len(tokens)), distance
        parts.append(part)
    return np.concatenate(parts) if parts else np.empty(0, _ENTRY)


class ApolloStore:
    """Windows in the order in which they came."""

    def __init__(self) -> None:
        self.windows: list[StoredWindow] = []
        self._holding: dict[int, int] = {}

    def add(self, windows: Iterable[StoredWindow]) -> None:
        """All of them or, where this is interrupted, none."""
        all_windows, holding = list(self.windows), dict(self._holding)
        for window in windows:
            all_windows.append(window)
            for token in np.unique(window.tokens).tolist():
                holding[token] = holding.get(token, 0) + 1
        self.windows, self._holding = all_windows, holding

    def route(self, question: Sequence[int]) -> int:
        """The window for a question. Raises RetrievalMiss for an empty store, and where no window has a term of it."""
        if not self.windows:
            raise RetrievalMiss("the store is empty; ingest a context first")
        terms = np.unique(np.asarray(question, np.int64))
        scores = [self._score(window.tokens, terms) for window in self.windows]
        best = int(np.argmax(scores))
        if scores[best] == 0:
            raise RetrievalMiss("no token of the question occurs in the store")
        return best

    def retrieve(self, window: int, said: Sequence[int], top_k: int) -> Retrieved:
        """What followed the terms of `said` in a window and is not among them; empty where nothing is."""
        entries = self.windows[window].entries
        asked = np.asarray(said, np.int64)
        entries = entries[np.isin(entries["term"], asked) & ~np.isin(entries["token"], asked)]
        worth = self._idf(entries["term"]) * self._idf(entries["token"]) / entries["distance"]
        places, of_place = np.unique(entries["place"], return_inverse=True)
        worth_of_place = np.bincount(of_place, worth, minlength=len(places))
        tokens, of_token = np.unique(self.windows[window].tokens[places], return_inverse=True)
        best = np.zeros(len(tokens))
        np.maximum.at(best, of_token, worth_of_place)
        order = np.argsort(-best, kind="stable")[:top_k]
        total = best[order].sum()
        return Retrieved(window, tokens[order].astype(np.int64), best[order] / total if total else best[order])

    def _score(self, tokens: Ids, terms: npt.NDArray[np.int64]) -> float:
        found, counts = np.unique(tokens[np.isin(tokens, terms)], return_counts=True)
        return float(((1 + np.log(counts)) * self._idf(found)).sum())

    def _idf(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
        holding = np.array([self._holding[token] for token in tokens.tolist()], np.float64)
        return np.log1p(len(self.windows) / holding)

    @property
    def token_bytes(self) -> int:
        return sum(window.tokens.nbytes for window in self.windows)

    @property
    def boundary_bytes(self) -> int:
        return sum(window.boundary.nbytes for window in self.windows)

    @property
    def entry_bytes(self) -> int:
        return sum(window.entries.nbytes for window in self.windows)
