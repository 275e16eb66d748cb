"""Sink tokens and sink weights: resident first tokens are what `stream` needs; learned sinks are another thing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from kvtape.backends.llama.engine import LlamaEngine
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.protocol import SessionConfig
from kvtape.cli.models import demo_model
from support.llama_tiny import model_file, session, tokens
from support.tiny_gguf import TINY_ARCHS

N = 40
"""Fewer tokens than the window of the tiny gpt-oss, so that nothing leaves it by itself."""

TEXT = Path(__file__).parents[2] / "examples" / "text" / "harbour.txt"


def tensors(path: Path) -> dict[str, npt.NDArray[np.generic]]:
    return {t.name: t.data for t in gguf.GGUFReader(path).tensors}


def filled(sink_weight: float) -> LlamaBackend:
    backend = session("gpt-oss", config={"n_ctx": 256, "options": {"swa_full": "yes"}}, sink_weight=sink_weight)
    backend.prefill(tokens(N), 0)
    return backend


def next_logits(backend: LlamaBackend) -> npt.NDArray[np.float32]:
    """Of one more token, which is then taken back."""
    logits = backend.prefill(tokens(1, seed=9), N).logits.copy()
    backend.truncate(N)
    return logits


# -- learned sink weights ---------------------------------------------------------------------------------------------


def test_two_files_that_differ_in_their_sink_weights_alone() -> None:
    weak, strong = (tensors(model_file("gpt-oss", sink_weight=w)) for w in (-1.0, 2.0))
    assert [n for n in weak if not np.array_equal(weak[n], strong[n])] == [f"blk.{i}.attn_sinks.weight" for i in (0, 1)]


def test_other_weights_other_logits_and_no_row_for_them() -> None:
    """One row a token, whatever the weights."""
    weak, strong = filled(-1.0), filled(2.0)
    assert np.abs(next_logits(weak) - next_logits(strong)).max() > 1e-3
    for backend in (weak, strong):
        assert sum(s.length for s in backend.books()) == N
        seen = backend.witness()
        assert sorted(seen.cache_positions.tolist()) == list(range(N))
        assert {len(rows) for rows in (*seen.rows.keys, *seen.rows.values)} == {N}
    assert weak.kv_bytes() == strong.kv_bytes()
    # The second layer, of full attention, was told less by the first, so its rows are others.
    (first,), (second,) = (b.witness().rows.keys for b in (weak, strong))
    assert first.shape == second.shape
    assert not np.array_equal(first, second)


def test_the_first_tokens_go_and_the_weights_stay() -> None:
    """Eviction takes rows. The learned logit is in the model, and it still counts when no early token is left."""
    logits = {}
    for weight in (-1.0, 2.0):
        backend = filled(weight)
        before = next_logits(backend)
        kept = backend.witness()
        backend.evict(0, 4)
        seen = backend.witness()
        assert sorted(seen.cache_positions.tolist()) == list(range(4, N))
        stays = kept.cache_positions >= 4
        order, order_before = np.argsort(seen.cache_positions), np.argsort(kept.cache_positions[stays])
        for rows, earlier in zip(seen.rows.keys, kept.rows.keys, strict=True):
            np.testing.assert_array_equal(rows[order], earlier[stays][order_before])
        logits[weight] = next_logits(backend)
        assert np.abs(logits[weight] - before).max() > 1e-4, "the first tokens were attended to"
    assert np.abs(logits[-1.0] - logits[2.0]).max() > 1e-3


@pytest.mark.parametrize("arch", sorted(set(TINY_ARCHS) - {"gpt-oss"}))
def test_no_other_model_has_sink_weights(arch: str) -> None:
    assert not [name for name in tensors(model_file(arch)) if "sink" in name]


def test_no_weights_are_added_to_a_model_that_has_none() -> None:
    """All of every query's attention is on resident rows, with the first tokens there and without them."""
    backend = session("llama", config={"n_ctx": 256, "options": {"scores": "on"}})
    backend.prefill(tokens(N), 0)
    per_query = backend.take_mass().mass.sum(axis=1) / N
    np.testing.assert_allclose(per_query, per_query.round(), rtol=1e-5)
    backend.evict(0, 4)
    backend.prefill(tokens(8, seed=9), N)
    np.testing.assert_allclose(backend.take_mass().mass.sum(axis=1) / 8, per_query.round(), rtol=1e-5)


# -- sink tokens, on the real model -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def real() -> Iterator[LlamaEngine]:
    loaded = LlamaEngine.load(demo_model())
    yield loaded
    loaded.close()


def nll(logits: npt.NDArray[np.float32], token: int) -> float:
    exact = logits.astype(np.float64)
    top = exact.max()
    return float(top + np.log(np.exp(exact - top).sum()) - exact[token])


def test_four_resident_first_tokens_are_enough(real: LlamaEngine) -> None:
    """The same cache three ways, the same 32 tokens next: without 4 later tokens, and without the 4 first ones."""
    text = real.tokenize(TEXT.read_text(encoding="utf-8"))[:256]
    known, coming = text[:224], text[224:]
    backend = real.open(SessionConfig(n_ctx=256))
    last = backend.prefill(known, 0).logits.copy()
    saved = backend.snapshot()

    def loss(*gone: tuple[int, int]) -> float:
        backend.restore(saved)
        for start, stop in gone:
            backend.evict(start, stop)
        seen: list[float] = []
        forced = iter(coming)

        def choose(logits: npt.NDArray[np.float32]) -> int:
            token = next(forced)
            seen.append(nll(logits, token))
            return token

        backend.decode_until(len(coming), 256, len(known), last, choose)
        # The first token's logits are from before the evict.
        return float(np.mean(seen[1:]))

    dense, later, first = loss(), loss((4, 8)), loss((0, 4))
    assert abs(later - dense) < 0.1
    assert first - dense > 0.3
    # A window that keeps a third of the tokens: with the first four of them, and with four more recent ones instead.
    windowed, without_sinks = loss((4, 154)), loss((0, 150))
    assert without_sinks - windowed > 0.3
    backend.close()
