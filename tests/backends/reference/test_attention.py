"""Attention over pages against a softmax written out in float64, and what must not change a bit of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.reference.errors import InvariantViolation
from kvtape.backends.reference.model import attention
from kvtape.backends.reference.model.attention import AttentionBlock, AttentionRule, attend, narrower
from kvtape.backends.reference.model.pages import PageStore, paged

SPAN = 700


@dataclass(frozen=True)
class Case:
    """Keys at `at`, a query at each of `queries`, which are among them."""

    at: np.ndarray
    queries: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    rule: AttentionRule


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n_kv, group = draw(st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
    dim_k, dim_v = draw(st.sampled_from([(16, 16), (32, 16)]))
    at = np.sort(rng.choice(SPAN, draw(st.integers(1, 500)), replace=False)).astype(np.int64)
    queries = at[-draw(st.integers(1, min(len(at), 150))) :]

    def rows(n: int, heads: int, dim: int) -> np.ndarray:
        return rng.standard_normal((n, heads, dim)).astype(np.float32)

    rule = AttentionRule(dim_k**-0.5, draw(st.sampled_from([0, 1, 7, 64, 300])), draw(st.sampled_from([0.0, 2.0])))
    q = rows(len(queries), n_kv * group, dim_k)
    return Case(at, queries, q, rows(len(at), n_kv, dim_k), rows(len(at), n_kv, dim_v), rule)


def seen(case: Case) -> np.ndarray:
    """`[n_queries, n_keys]`."""
    behind = case.queries[:, None] - case.at
    return (behind >= 0) & ((behind < case.rule.window) | (case.rule.window == 0))


def written_out(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Outputs `[n, heads, dim_v]` and probabilities `[heads, n, n_keys]`, in float64."""
    group = case.q.shape[1] // case.k.shape[1]
    out, probabilities = [], []
    for head in range(case.q.shape[1]):
        q, k, v = (x.astype(np.float64) for x in (case.q[:, head], case.k[:, head // group], case.v[:, head // group]))
        scores = q @ k.T * case.rule.scale
        if case.rule.cap:
            scores = case.rule.cap * np.tanh(scores / case.rule.cap)
        weights = np.where(seen(case), np.exp(scores), 0)
        weights /= weights.sum(axis=1, keepdims=True)
        out.append(weights @ v)
        probabilities.append(weights)
    return np.stack(out, axis=1), np.stack(probabilities)


@settings(max_examples=25)
@given(cases(), st.sampled_from([1, 2**24]))
def test_attention_is_a_softmax_average(case: Case, score_bytes: int) -> None:
    want, probabilities = written_out(case)
    got = np.zeros_like(probabilities)
    group = case.q.shape[1] // case.k.shape[1]

    def observe(block: AttentionBlock) -> None:
        here = np.isin(block.positions, case.at)
        assert not block.weights[:, :, ~here].any()
        columns = np.searchsorted(case.at, block.positions[here])
        for kv_head, weights in enumerate(block.weights, block.first_head):
            for i, row in enumerate(weights):
                got[kv_head * group + block.members[i], block.queries[i], columns] += row[here]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_SCORE_BYTES", score_bytes)
        out = attend(case.q, case.queries, paged(case.at, case.k, case.v), case.rule, observe)
    np.testing.assert_allclose(out.reshape(want.shape), want, rtol=0, atol=2e-6)
    np.testing.assert_allclose(got, probabilities, rtol=0, atol=1e-6)


@settings(max_examples=20)
@given(cases(), st.data())
def test_neither_company_nor_rows_out_of_sight_change_a_bit(case: Case, data: st.DataObject) -> None:
    whole = attend(case.q, case.queries, paged(case.at, case.k, case.v), case.rule)
    start = data.draw(st.integers(0, len(case.queries) - 1))
    stop = data.draw(st.integers(start + 1, len(case.queries)))
    needed = seen(case)[start:stop].any(axis=0)
    store = PageStore(case.k.shape[1], case.k.shape[2], case.v.shape[2], np.dtype(np.float32))
    store.append(case.at, case.k, case.v)
    for position in case.at[~needed].tolist():
        store.remove(position, position + 1)
    if needed.any():
        store.drop_below(int(case.at[needed][0]))
    some = attend(case.q[start:stop], case.queries[start:stop], store.pages(), case.rule)
    np.testing.assert_array_equal(some, whole[start:stop])


@given(cases())
@settings(max_examples=6)
def test_a_small_bound_of_memory_gives_the_same_bits(case: Case) -> None:
    pages = paged(case.at, case.k, case.v)
    whole = attend(case.q, case.queries, pages, case.rule)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_SCORE_BYTES", 1)
        np.testing.assert_array_equal(attend(case.q, case.queries, pages, case.rule), whole)


def test_a_query_that_sees_nothing_is_an_error() -> None:
    rows = np.ones((2, 1, 16), np.float32)
    pages = paged(np.asarray([300, 301]), rows, rows)
    for position in (3, 290):
        with pytest.raises(InvariantViolation):
            attend(rows[:1], np.asarray([position]), pages, AttentionRule(0.25))
    with pytest.raises(InvariantViolation, match="sees no key"):
        attend(rows[:1], np.asarray([400]), pages, AttentionRule(0.25, window=50))


def test_of_two_windows_the_narrower_counts() -> None:
    assert [narrower(0, 0), narrower(0, 5), narrower(5, 0), narrower(5, 3)] == [0, 5, 5, 3]
