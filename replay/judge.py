"""The judge of one session on one backend: is what the engine's memory holds what the log says it holds?

Everything is matched through cache positions: a stored row stands at one, the fold says which tape position that is,
the lineage which computation of which token it must be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from kvtape.backends.protocol import Backend, KvRows, Witness
from kvtape.backends.reference.model.weights import Weights
from kvtape.planner.layout import Layout, normalise
from kvtape.replay.findings import Finding, Tolerances, as_pairs
from kvtape.replay.identity import KeyTable
from kvtape.replay.ledger import LedgerRows, RowFault, RowLedger
from kvtape.replay.lineage import LineageBuilder, Rows

__all__ = ["MARGIN", "Judge", "Verdict"]

Ints = npt.NDArray[np.int64]

MARGIN: Final = 1.5
"""How many times nearer to one token's key than to any other's a key must be to say which token it is. Rounding has no
direction: it does not lead a row of a hundred components so far into the one that points at another key."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look found. `positions_agree`: the stored positions are exactly those expected; `rows` looked at,
    `identified` of them by their layer-0 key, `unclear` those whose key rounding left between two tokens."""

    findings: tuple[Finding, ...]
    positions_agree: bool
    rows: int
    identified: int
    unclear: int = 0


class Judge:
    """Compares a backend with its lineage after every event.

    Without `weights` (a model that the numpy code does not cover) rows have no identity to check and a moved key is
    not compared; everything else is.
    """

    def __init__(self, weights: Weights | None, tokens: Ints, tolerances: Tolerances) -> None:
        self._tolerances = tolerances
        self._table = KeyTable(weights, tokens) if weights is not None and len(tokens) else None
        rotaries = weights.architecture.rotaries if weights is not None else None
        n_kv_heads = weights.architecture.shape.n_head_kv if weights is not None else 1
        self._ledger = RowLedger(rotaries, n_kv_heads, tolerances.moved_key)

    def look(self, expected: LineageBuilder, backend: Backend) -> Verdict:
        """Books, positions, row counts, then identity, ledger and mirror of every row."""
        books = _books(expected.layout, backend.books())
        witness = backend.witness()
        rows = expected.rows()
        positions = _positions(rows, witness)
        counts = _counts(witness.rows, len(witness.cache_positions))
        found = [*books, *positions, *counts]
        if positions or counts:
            return Verdict(tuple(found), not positions, len(rows.slots), 0)
        order = np.argsort(witness.cache_positions, kind="stable")
        stored = LedgerRows(rows.slots, rows.cache, _ordered(witness.rows, order))
        faults = self._ledger.see(stored, expected.reachable())
        identity, identified, unclear = self._identify(rows, stored.rows)
        found += identity
        found += [_row_finding(fault, rows) for fault in faults]
        found += _mirror(witness, order, rows)
        return Verdict(tuple(found), True, len(rows.slots), identified, unclear)

    def _identify(self, rows: Rows, stored: KvRows) -> tuple[list[Finding], int, int]:
        """Findings, and how many rows are known and how many unclear; the ledger has seen these rows."""
        if self._table is None or not len(rows.slots):
            return [], 0, 0
        seen = self._table.identify(stored.keys[0], rows.cache, rows.tokens)
        tolerance = self._tolerances.identity_after(self._ledger.moves)
        wrong = ~(seen.distance <= tolerance) | (seen.distance > MARGIN * seen.other)
        known = ~wrong & (seen.other > MARGIN * seen.distance)
        n_known, n_unclear = int(known.sum()), int((~wrong & ~known).sum())
        if not wrong.any():
            return [], n_known, n_unclear
        i = int(np.flatnonzero(wrong)[0])
        what = (
            f"witness: {int(wrong.sum())} rows do not hold their token; the first, at tape {rows.tape[i]}, cache "
            f"{rows.cache[i]}, is {seen.distance[i]:.3g} away from token {rows.tokens[i]} there (tolerance "
            f"{tolerance[i]:.3g}); the nearest of the session's tokens is {seen.nearest[i]}"
        )
        return [Finding(what, as_pairs(rows.tape), as_pairs(rows.tape[~wrong]))], n_known, n_unclear


def _books(expected: Layout, books: Layout) -> list[Finding]:
    try:
        found = normalise(books)
    except ValueError as err:
        return [Finding(f"books: not a layout ({err})")]
    if found == expected:
        return []
    tape = [[t for s in layout for t in range(s.tape_start, s.tape_stop)] for layout in (expected, found)]
    cache = [[c for s in layout for c in range(s.cache_start, s.cache_stop)] for layout in (expected, found)]
    if sorted(tape[0]) != sorted(tape[1]):
        return [Finding("books: other tape positions resident", as_pairs(tape[0]), as_pairs(tape[1]))]
    what = "books: other cache positions" if sorted(cache[0]) != sorted(cache[1]) else "books: rows in another order"
    return [Finding(what, as_pairs(cache[0]), as_pairs(cache[1]))]


def _positions(rows: Rows, witness: Witness) -> list[Finding]:
    found = np.sort(witness.cache_positions)
    if np.array_equal(found, rows.cache):
        return []
    source = "the engine's memory" if witness.positions_from == "engine" else "the books"
    what = f"witness: {len(found)} rows at cache positions of {source}, expected {len(rows.cache)}"
    return [Finding(what, as_pairs(rows.cache), as_pairs(found))]


def _counts(rows: KvRows, n: int) -> list[Finding]:
    wrong = [
        f"layer {layer} {kind} {len(stored)}"
        for kind, layers in (("keys", rows.keys), ("values", rows.values))
        for layer, stored in enumerate(layers)
        if len(stored) != n
    ]
    more = f" and {len(wrong) - 4} more" if len(wrong) > 4 else ""
    return [Finding(f"witness: {n} rows expected in every layer, found {', '.join(wrong[:4])}{more}")] if wrong else []


def _ordered(rows: KvRows, order: Ints) -> KvRows:
    if np.array_equal(order, np.arange(len(order))):
        return rows
    return KvRows(tuple(k[order] for k in rows.keys), tuple(v[order] for v in rows.values))


def _row_finding(fault: RowFault, rows: Rows) -> Finding:
    tape = rows.tape[np.isin(rows.slots, fault.slots)]
    what = f"witness: layer {fault.layer}: {fault.what}, {len(fault.slots)} rows, relative distance {fault.worst:.3g}"
    return Finding(what, None, as_pairs(tape))


def _mirror(witness: Witness, order: Ints, rows: Rows) -> list[Finding]:
    """The first layer and part in which the engine's rows are not those of the host's copy."""
    if witness.mirror is None:
        return []
    for part in ("keys", "values"):
        engine, mirror = getattr(witness.rows, part), getattr(witness.mirror, part)
        for layer, (stored, copied) in enumerate(zip(engine, mirror, strict=True)):
            if np.array_equal(stored, copied):
                continue
            what = f"witness: layer {layer}: the engine's {part} are not those of the mirror"
            if stored.shape != copied.shape:
                return [Finding(f"{what} ({len(stored)} rows, mirror {len(copied)})")]
            bad = (stored != copied).any(axis=1)[order]
            return [Finding(what, None, as_pairs(rows.tape[bad]))]
    return []
