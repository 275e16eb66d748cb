"""The row ledger: rows may only come back as what they were."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.protocol import KvRows
from kvtape.backends.reference.model.rope import Rotary, plain_frequencies
from kvtape.replay.ledger import LedgerRows, RowLedger

ROTARY = Rotary(plain_frequencies(10000.0, 8), "interleaved")
EVERY = np.arange(1000)


def rows_of(slots: list[int], positions: list[int]) -> LedgerRows:
    """Two layers, two heads of 8: what slot s holds follows from s alone, keys turned to their position."""
    keys, values = [], []
    for layer in range(2):
        drawn = [np.random.default_rng([s, layer]).normal(size=(2, 2, 8)) for s in slots]
        base = np.array([d[0] for d in drawn]).reshape(len(slots), 2, 8)
        turned = ROTARY.rotate(base, np.array(positions, np.int64))
        keys.append(turned.reshape(len(slots), 16).astype(np.float32))
        values.append(np.array([d[1] for d in drawn]).reshape(len(slots), 16).astype(np.float32))
    return LedgerRows(np.array(slots, np.int64), np.array(positions, np.int64), KvRows(tuple(keys), tuple(values)))


def ledger() -> RowLedger:
    return RowLedger([ROTARY] * 2, 2, 1e-3)


moves = st.lists(
    st.dictionaries(st.integers(0, 12), st.integers(0, 5000), min_size=1).filter(
        lambda d: len(set(d.values())) == len(d)
    ),
    min_size=1,
    max_size=6,
)


@given(moves)
@settings(max_examples=60, deadline=None)
def test_true_rows_never_fault_whatever_leaves_moves_and_comes_back(looks: list[dict[int, int]]) -> None:
    book = ledger()
    for look in looks:
        assert book.see(rows_of(list(look), list(look.values())), EVERY) == []


def changed(rows: LedgerRows, part: str, layer: int, row: int, delta: float) -> LedgerRows:
    parts: dict[str, list[npt.NDArray[Any]]] = {"keys": list(rows.rows.keys), "values": list(rows.rows.values)}
    parts[part][layer] = parts[part][layer].copy()
    parts[part][layer][row, 3] += delta
    return LedgerRows(rows.slots, rows.positions, KvRows(tuple(parts["keys"]), tuple(parts["values"])))


@given(moves, st.sampled_from(["keys", "values"]), st.integers(0, 1), st.integers(0, 100))
@settings(max_examples=60, deadline=None)
def test_one_changed_number_is_found_in_its_layer_and_slot(
    looks: list[dict[int, int]], part: str, layer: int, pick: int
) -> None:
    book = ledger()
    known: set[int] = set()
    for look in looks:
        book.see(rows_of(list(look), list(look.values())), EVERY)
        known |= set(look)
    last = looks[-1]
    slot = sorted(last)[pick % len(last)]
    shown = changed(rows_of(list(last), list(last.values())), part, layer, list(last).index(slot), 0.5)
    (fault,) = book.see(shown, EVERY)
    assert (fault.layer, fault.slots.tolist()) == (layer, [slot])
    assert part in fault.what


def test_moving_without_turning_and_turning_twice() -> None:
    book = ledger()
    book.see(rows_of([0, 1], [0, 10]), EVERY)
    still = LedgerRows(np.array([0, 1]), np.array([0, 5]), rows_of([0, 1], [0, 10]).rows)
    assert [f.slots.tolist() for f in book.see(still, EVERY)] == [[1], [1]]

    book = ledger()
    book.see(rows_of([0, 1], [0, 10]), EVERY)
    twice = LedgerRows(np.array([0, 1]), np.array([0, 5]), rows_of([0, 1], [0, 0]).rows)
    assert {f.what for f in book.see(twice, EVERY)} == {"moved keys are not the old keys turned by the shift"}


def test_rows_that_can_never_come_back_are_let_go() -> None:
    book = ledger()
    book.see(rows_of(list(range(8)), list(range(8))), EVERY)
    book.see(rows_of([0, 1], [0, 1]), np.array([0, 1, 5]))
    assert book.n_rows == 3
    assert book.see(changed(rows_of([5], [5]), "values", 1, 0, 0.5), np.array([5]))
    book.see(rows_of([0], [0]), np.array([0]))
    assert book.n_rows == 1
