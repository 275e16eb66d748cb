"""apollo: what it retrieves, where it puts it, and what it owes its caller like any engine."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import InputRejected
from kvtape.backends.reference.engines.apollo import ApolloEngine
from kvtape.backends.reference.engines.apollo_store import REACH, WINDOW_TOKENS, ApolloStore, StoredWindow, entries_of
from kvtape.backends.reference.engines.engine import Contract, KvEngine
from kvtape.backends.reference.engines.harness import Harness
from kvtape.backends.reference.engines.registry import make_engine, parse_engine
from kvtape.backends.reference.errors import BackendFailure, EmptyPrompt, ExecutionRefused, RetrievalMiss
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.steps import attn_out, embed, ffn, qkv
from kvtape.backends.reference.model.weights import Weights
from support.llama_tiny import model_file
from support.reference import FailingFfn, text, weights

KEY, ANSWER = [290, 291, 292], [280, 281, 282]


def _engine(spec: str = "apollo:layer=1") -> ApolloEngine:
    engine = make_engine(parse_engine(spec))
    assert isinstance(engine, ApolloEngine)
    return engine


def _context(n: int = 400, at: int = 200, seed: int = 0) -> list[int]:
    hay = [int(t) for t in np.random.default_rng(seed).integers(3, 270, n)]
    return [*hay[:at], *KEY, *ANSWER, *hay[at:]]


def _store(*windows: list[int]) -> ApolloStore:
    store = ApolloStore()
    arrays = [np.asarray(window, np.int32) for window in windows]
    store.add(StoredWindow(ids, np.zeros(4, np.float32), entries_of(ids)) for ids in arrays)
    return store


def test_a_question_goes_where_its_rare_tokens_are() -> None:
    """Token 1 is everywhere, and often in the second window; 9 is in the third alone, once."""
    store = _store([1, 2, 3], [1, 1, 1, 2], [1, 9, 5], [3, 3])
    assert store.route([1]) == 1
    assert store.route([1, 9]) == 2
    assert store.route([9, 9, 1, 1]) == 2
    assert store.route([1, 2]) == 1
    assert store.route([77, 3]) == 3


def test_scores_are_tf_idf() -> None:
    store = _store([1, 2, 3], [1, 1, 1, 2], [1, 9, 5], [3, 3])
    ids = store.windows[1].tokens
    want = (1 + np.log(3)) * np.log(1 + 4 / 3) + np.log(1 + 4 / 2)
    assert store._score(ids, np.array([1, 2, 8])) == pytest.approx(want)


def test_what_is_retrieved_followed_the_question() -> None:
    """The nearest first; tokens of the question are not among it, and what was said counts as the question."""
    store = _store([50, 51, 1, 2, 60, 61, 62], [7, 8])
    found = store.retrieve(0, [1, 2], 8)
    assert found.tokens.tolist() == [60, 61, 62]
    near, rare = np.array([1 + 1 / 2, 1 / 2 + 1 / 3, 1 / 3 + 1 / 4]), np.log(3) ** 2
    np.testing.assert_allclose(found.shares, near * rare / (near * rare).sum())
    assert store.retrieve(0, [1, 2], 1).tokens.tolist() == [60]
    assert store.retrieve(0, [1, 2, 60], 8).tokens.tolist() == [61, 62]
    assert store.retrieve(0, [62], 8).tokens.tolist() == []


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40))
def test_entries_are_the_pairs_within_reach(tokens: list[int]) -> None:
    entries = entries_of(np.asarray(tokens, np.int32))
    pairs = [(tokens[p - d], tokens[p], p, d) for d in range(1, REACH + 1) for p in range(d, len(tokens))]
    assert [tuple(entry) for entry in entries.tolist()] == pairs


@given(
    windows=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=20), min_size=1, max_size=4),
    question=st.lists(st.integers(0, 14), min_size=1, max_size=6),
    top_k=st.integers(1, 9),
)
def test_retrieval_keeps_its_rules(windows: list[list[int]], question: list[int], top_k: int) -> None:
    store = _store(*windows)
    if not set(question) & {token for window in windows for token in window}:
        with pytest.raises(RetrievalMiss, match="no token of the question"):
            store.route(question)
        return
    found = store.retrieve(store.route(question), question, top_k)
    assert set(found.tokens.tolist()) <= set(windows[found.window]) - set(question)
    assert len(found.tokens) <= top_k
    assert (np.diff(found.shares) <= 0).all()
    assert not len(found.shares) or found.shares.sum() == pytest.approx(1)


def test_an_answer_comes_from_the_store() -> None:
    """On a model that knows nothing, over 20 contexts: most of the answer; without the delta nothing."""
    model, right = weights("llama"), {30: 0, 0: 0}
    for seed in range(20):
        for coef in right:
            harness = Harness(parse_engine(f"apollo:layer=1,coef={coef}"), model)
            logits = harness.begin(KEY, _context(at=20 * seed, seed=seed))
            for token in ANSWER:
                right[coef] += int(logits.argmax()) == token
                logits = harness.step(token)
    assert right[30] >= 48
    assert right[0] <= 6


def test_the_delta_stands_in_the_last_row_at_its_layer() -> None:
    """Against the layers written out, in float64, a softmax over a list of rows."""
    model = weights("llama", "float64")
    engine, local = _engine("apollo:layer=1,coef=3.5,top_k=4"), LocalFfn(model)
    context = _context(100, at=50)
    engine.ingest(model, local, context)
    got = [engine.query(model, local, KEY), engine.decode_step(model, local, ANSWER[0])]
    assert engine.retrieved is not None
    boundary = _layer(model, 0, embed(model, context), np.arange(106), None)[0][-1:]
    kept: list[Kept | None] = [None, None]
    start = len(context)
    for step, said in enumerate(([*KEY], [*KEY, ANSWER[0]])):
        new = said if step == 0 else said[-1:]
        at = np.arange(start, start + len(new))
        start += len(new)
        x, kept[0] = _layer(model, 0, embed(model, new), at, kept[0])
        found = engine.store.retrieve(0, said, 4)
        head = model.head.matrix.rows(found.tokens)
        x[-1] += 3.5 * (found.shares[:, None] * head / np.linalg.norm(head, axis=1)[:, None]).sum(0)
        if step == 0:
            x, at = np.concatenate([boundary, x]), np.arange(len(context) - 1, start)
        x, kept[1] = _layer(model, 1, x, at, kept[1])
        np.testing.assert_allclose(got[step][0], x[-1], rtol=0, atol=1e-10)


Kept = tuple[np.ndarray, np.ndarray, np.ndarray]


def _layer(model: Weights, layer: int, x: np.ndarray, at: np.ndarray, before: Kept | None) -> tuple[np.ndarray, Kept]:
    """Rows behind the layer; positions, keys and values of all rows so far."""
    q, k, v = qkv(model, layer, x, at)
    key_at = at
    if before is not None:
        key_at, k, v = (np.concatenate(pair) for pair in zip(before, (at, k, v), strict=True))
    out = np.empty((len(x), 4, 32))
    for i in range(len(x)):
        seen = key_at <= at[i]
        for head in range(4):
            scores = k[seen, head // 2] @ q[i, head] / np.sqrt(32)
            p = np.exp(scores - scores.max())
            out[i, head] = p @ v[seen, head // 2] / p.sum()
    x = x + attn_out(model, layer, out.reshape(len(x), -1))
    x = x + ffn(model, layer, x, LocalFfn(model))
    return x, (key_at, k, v)


@pytest.mark.parametrize("layer", range(2))
def test_failed_calls_leave_no_trace(layer: int) -> None:
    model, local = weights("llama"), LocalFfn(weights("llama"))
    good, bad = _engine(), _engine()
    good.ingest(model, local, _context())
    if layer == 0:
        with pytest.raises(BackendFailure):
            bad.ingest(model, FailingFfn(model, layer), _context())
        with pytest.raises(RetrievalMiss, match="store is empty"):
            bad.query(model, local, KEY)
    bad.ingest(model, local, _context())
    want = [good.query(model, local, KEY), *(good.decode_step(model, local, token) for token in ANSWER)]
    with pytest.raises(BackendFailure):
        bad.query(model, FailingFfn(model, layer), KEY)
    with pytest.raises(EmptyPrompt, match="before any question"):
        bad.decode_step(model, local, ANSWER[0])
    np.testing.assert_array_equal(bad.query(model, local, KEY), want[0])
    for i, token in enumerate(ANSWER):
        before = (bad.memory(), bad.stage_summary())
        with pytest.raises(BackendFailure):
            bad.decode_step(model, FailingFfn(model, layer), token)
        assert (bad.memory(), bad.stage_summary()) == before
        np.testing.assert_array_equal(bad.decode_step(model, local, token), want[i + 1])
    assert bad.stage_summary() == good.stage_summary()


def test_packed_weights_give_the_same_bits() -> None:
    runs = []
    for packed in (False, True):
        model = Weights(model_file("llama", n_head=4, n_head_kv=2, head_dim=32, weights="q8_0"), packed=packed)
        harness = Harness(parse_engine("apollo:layer=1"), model)
        runs.append(np.stack([harness.begin(KEY, _context()), *(harness.step(token) for token in ANSWER)]))
    np.testing.assert_array_equal(*runs)


def test_memory_is_what_the_store_and_the_session_hold() -> None:
    model, engine = weights("llama"), _engine()
    engine.ingest(model, LocalFfn(model), _context(400))
    engine.query(model, LocalFfn(model), KEY)
    engine.decode_step(model, LocalFfn(model), 5)
    memory = engine.memory()
    kinds = {kind.kind: kind.occupied for kind in memory.kinds}
    n_windows, row = -(-406 // WINDOW_TOKENS), 2 * 2 * 32 * 4
    pairs = 3 * sum(WINDOW_TOKENS - d for d in range(1, 9)) + sum(406 - 3 * WINDOW_TOKENS - d for d in range(1, 9))
    assert kinds == {"kv": (4 + 5) * row, "tokens": 4 * 406, "boundary": n_windows * 64 * 4, "entries": 16 * pairs}
    assert memory.cold_bytes == memory.occupied_bytes - kinds["kv"]
    assert (memory.reachable_tokens, memory.rows) == (5, 5)
    assert engine.stage_summary()["windows_ingested"] == n_windows


def test_what_is_refused_and_missed() -> None:
    model, local, engine = weights("llama"), LocalFfn(weights("llama")), _engine()
    with pytest.raises(RetrievalMiss, match="the store is empty; ingest a context first"):
        engine.query(model, local, KEY)
    engine.ingest(model, local, [5, 6, 7])
    with pytest.raises(RetrievalMiss, match="no token of the question occurs"):
        engine.query(model, local, [8, 9])
    with pytest.raises(RetrievalMiss, match="follows a token of the question"):
        engine.query(model, local, [7])
    with pytest.raises(EmptyPrompt):
        engine.query(model, local, [])
    with pytest.raises(InputRejected):
        engine.ingest(model, local, [model.n_vocab])
    with pytest.raises(ExecutionRefused, match="other weights"):
        engine.query(weights("qwen3"), local, [5])
    with pytest.raises(
        ExecutionRefused, match=r"unsupported.*layer=30 of a model whose layers are 0\.\.1; give layer="
    ):
        _engine("apollo").ingest(model, local, text(5))


def test_it_is_no_kv_engine() -> None:
    engine = _engine()
    assert not isinstance(engine, KvEngine)
    assert (engine.info.contract, engine.info.bench_only, engine.info.experimental) == (Contract.TASK, True, True)
    assert parse_engine("apollo:layer=30,coef=10.0,top_k=8").spec == "apollo"
    assert parse_engine("apollo:coef=2.5").spec == "apollo:coef=2.5"
