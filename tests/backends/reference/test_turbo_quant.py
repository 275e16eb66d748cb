"""turbo-quant: what it keeps of its promise, codes that are written once, steps that fail."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.reference.engines.engine import Contract
from kvtape.backends.reference.engines.turbo_quant import FLOORS, CodedRows, TurboQuantEngine
from kvtape.backends.reference.errors import BackendFailure, ExecutionRefused, InvariantViolation
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import NewRows, Seen
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.weights import Weights
from support.llama_tiny import model_file
from support.reference import FailingFfn, kv_engine, play, text, weights

SPECS = {"tq4": 4, "tq3": 3}


def _engine(spec: str) -> TurboQuantEngine:
    engine = kv_engine(spec)
    assert isinstance(engine, TurboQuantEngine)
    return engine


@pytest.mark.parametrize("shape", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("spec", sorted(SPECS))
def test_a_prompt_attends_to_exact_rows_and_later_rows_to_coded_ones(spec: str, shape: str) -> None:
    model, prompt = weights(shape), text(40)
    exact, coded = play("standard", model, prompt, 4), play(spec, model, prompt, 4)
    np.testing.assert_array_equal(coded.hidden[0], exact.hidden[0])
    assert (coded.hidden[1] != exact.hidden[1]).any()


@pytest.mark.parametrize("spec", sorted(SPECS))
def test_rows_keep_the_cosine_that_is_promised(spec: str) -> None:
    """Every row of a prompt, in a model whose rows of 64 components are one block each."""
    model, prompt = weights("llama"), text(250)
    exact, coded = play("standard", model, prompt, 0).engine, play(spec, model, prompt, 0).engine
    cosines = []
    for layer in range(2):
        for position in range(250):
            pairs = zip(_row(exact, layer, position), _row(coded, layer, position), strict=True)
            cosines += [float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs]
    assert np.mean(cosines) >= FLOORS[SPECS[spec]]
    assert np.mean(cosines) < 0.9999


def _row(engine: object, layer: int, position: int) -> tuple[Floats, Floats]:
    row = engine.read_kv_row(layer, position)  # type: ignore[attr-defined]
    assert row is not None
    return row  # type: ignore[no-any-return]


def test_a_new_row_sees_itself_exactly() -> None:
    """What the second token is given: the first decoded, its own as computed."""
    model, prompt = weights("llama"), text(9)
    rows = CodedRows(model, 4)
    rng = np.random.default_rng(0)
    for n, start in ((3, 0), (1, 3)):
        new = [_new(rng, n, start) for _ in range(2)]
        seen = [rows.seen(layer, new[layer]) for layer in range(2)]
        if start:
            for layer in range(2):
                keys = seen[layer].pages.keys[:, 0, :4]
                np.testing.assert_array_equal(keys[:, 3], new[layer].keys[0])
                stored = rows.row(layer, 1)
                assert stored is not None
                np.testing.assert_array_equal(keys[:, 1], stored[0])
        rows.commit()
    assert rows.rows_of_layers == (4, 4, 4, 4)
    assert len(prompt) == 9


def _new(rng: np.random.Generator, n: int, start: int) -> NewRows:
    keys, values = (rng.standard_normal((n, 2, 32)).astype(np.float32) for _ in range(2))
    return NewRows(np.arange(start, start + n, dtype=np.int64), np.zeros((n, 64), np.float32), keys, values)


@pytest.mark.parametrize("spec", sorted(SPECS))
def test_codes_are_written_once(spec: str) -> None:
    assert _rewritten(_engine(spec)) == 0


def test_a_second_encoding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: an engine that encodes its decoded rows again at every step writes other bytes."""

    def commit_twice(self: CodedRows, commit: object = CodedRows.commit) -> None:
        commit(self)  # type: ignore[operator]
        for store in (*self._keys, *self._values):
            decoded = store.decoded()
            store.n_rows = 0
            store.append(store.encode(decoded))

    monkeypatch.setattr(CodedRows, "commit", commit_twice)
    assert _rewritten(_engine("tq4")) > 0


def _rewritten(engine: TurboQuantEngine) -> int:
    """Steps after which bytes of an earlier row are not what they were."""
    model, local = weights("llama"), LocalFfn(weights("llama"))
    engine.prefill(model, local, text(30))
    count = 0
    for token in text(6, seed=1):
        before = _bytes(engine)
        engine.decode_step(model, local, token)
        count += any(not new.startswith(old) for old, new in zip(before, _bytes(engine), strict=True))
    assert engine.stage_summary() == {"rows_computed": 36, "rows_encoded": 36}
    return count


def _bytes(engine: TurboQuantEngine) -> list[bytes]:
    assert engine._rows is not None
    stores = (*engine._rows._keys, *engine._rows._values)
    return [part.tobytes() for store in stores for part in store.coded()]


def test_views_of_the_codes_cannot_be_written() -> None:
    engine = _engine("tq4")
    engine.prefill(weights("llama"), LocalFfn(weights("llama")), text(3))
    assert engine._rows is not None
    with pytest.raises(ValueError, match="read-only"):
        engine._rows._keys[0].coded().codes[0] = 0


@settings(max_examples=25, deadline=None)
@given(
    spec=st.sampled_from(sorted(SPECS)),
    n=st.integers(1, 40),
    faults=st.lists(st.lists(st.integers(0, 1), max_size=2), min_size=1, max_size=5),
)
def test_failed_steps_leave_no_trace(spec: str, n: int, faults: list[list[int]]) -> None:
    """Faults at any layer before any step: the same bits and the same codes as without."""
    model, local = weights("llama"), LocalFfn(weights("llama"))
    undisturbed, disturbed = _engine(spec), _engine(spec)
    for engine in (undisturbed, disturbed):
        engine.prefill(model, local, text(n))
    for token, layers in zip(text(len(faults), seed=2), faults, strict=True):
        for layer in layers:
            with pytest.raises(BackendFailure):
                disturbed.decode_step(model, FailingFfn(model, layer), token)
        want, got = (engine.decode_step(model, local, token) for engine in (undisturbed, disturbed))
        np.testing.assert_array_equal(got, want)
    assert _bytes(disturbed) == _bytes(undisturbed)
    assert disturbed.stage_summary() == undisturbed.stage_summary()


def test_a_copy_goes_on_by_itself() -> None:
    model, local, engine = weights("llama"), LocalFfn(weights("llama")), _engine("tq3")
    engine.prefill(model, local, text(20))
    copy, codes = engine.snapshot(), _bytes(engine)
    want = [engine.decode_step(model, local, token) for token in (7, 8)]
    other = _engine("tq3")
    other.restore(copy)
    assert _bytes(other) == codes
    np.testing.assert_array_equal([other.decode_step(model, local, token) for token in (7, 8)], want)
    assert _bytes(other) == _bytes(engine)


def test_memory_is_the_byte_formula() -> None:
    model = weights("llama")
    for spec, bits in SPECS.items():
        engine = _engine(spec)
        engine.prefill(model, LocalFfn(model), text(30))
        engine.decode_step(model, LocalFfn(model), 5)
        memory = engine.memory()
        row = 2 * (4 + 64 * bits // 8)
        assert (memory.reachable_tokens, memory.rows, memory.occupied_bytes) == (31, 31, 31 * 2 * row)
        assert memory.occupied_bytes <= memory.allocated_bytes <= 1.25 * memory.occupied_bytes
        assert engine.ratio_to(2) == 2 * 64 * 2 / row
        assert engine.ratio_to(4) == 2 * engine.ratio_to(2)


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = Weights(model_file("llama", n_head=3, n_head_kv=3, head_dim=16))
    with pytest.raises(ExecutionRefused, match="key row has 48 components, which no block of 256, 128, 64, 32"):
        _engine("tq4").prefill(odd, LocalFfn(odd), text(3))
    model = weights("llama")
    engine = _engine("tq4")
    engine.prefill(model, LocalFfn(model), text(3))
    with monkeypatch.context() as patched:
        patched.setattr(CodedRows, "seen", _seen_with_nan)
        with pytest.raises(InvariantViolation, match="layer 0: a row has a component that is not finite"):
            engine.decode_step(model, LocalFfn(model), 5)
    engine.decode_step(model, LocalFfn(model), 5)
    assert engine.info.contract is Contract.CODEC_BOUNDED


def _seen_with_nan(self: CodedRows, layer: int, new: NewRows, seen: object = CodedRows.seen) -> Seen:
    return seen(self, layer, new._replace(keys=new.keys * np.float32(np.nan)))  # type: ignore[operator, no-any-return]
