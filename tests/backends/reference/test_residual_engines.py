"""`markov-rs` and its coded kin: rows that give keys and values back, windows that bound memory and not attention."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.errors import UsageError
from kvtape.backends.reference.engines.codec_policy import parse_codec_policy
from kvtape.backends.reference.engines.growing_rows import GrowingRows
from kvtape.backends.reference.engines.residual_engine import ResidualEngine
from kvtape.backends.reference.engines.row_codecs import CODECS
from kvtape.backends.reference.errors import EmptyPrompt, ExecutionRefused
from kvtape.backends.reference.model import dispatch
from kvtape.backends.reference.model.dispatch import logits_of
from kvtape.backends.reference.model.ffn import LocalFfn
from kvtape.backends.reference.model.pages import PAGE
from kvtape.backends.reference.model.steps import Qkv, qkv
from kvtape.backends.reference.model.weights import Weights
from support.kv_oracle import PlainSession
from support.reference import SHAPES, kv_engine, play, text, weights


def residual(spec: str) -> ResidualEngine:
    engine = kv_engine(spec)
    assert isinstance(engine, ResidualEngine)
    return engine


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("window", [None, 1, 40, PAGE])
def test_markov_rs_is_standard_to_the_bit(shape: str, window: int | None) -> None:
    """Every step over a border of pages, whatever is cold."""
    model, prompt = weights(shape), text(PAGE - 4)
    run = play(f"markov-rs:window={window}" if window else "markov-rs", model, prompt, 8)
    standard = play("standard", model, prompt, 8)
    np.testing.assert_array_equal(run.hidden, standard.hidden)
    np.testing.assert_array_equal(logits_of(model, run.hidden), logits_of(model, standard.hidden))
    for layer in range(model.architecture.n_layer):
        for position in (0, PAGE - 9, PAGE + 3):
            mine, theirs = run.engine.read_kv_row(layer, position), standard.engine.read_kv_row(layer, position)
            assert mine is not None
            assert theirs is not None
            np.testing.assert_array_equal(mine[0], theirs[0])
            np.testing.assert_array_equal(mine[1], theirs[1])
    assert run.engine.read_kv_row(0, PAGE + 4) is None
    assert run.engine.read_kv_row(0, -1) is None


def test_markov_rs_is_standard_in_float64_too() -> None:
    model = weights("llama", "float64")
    run = play("markov-rs:window=9", model, text(30), 6)
    np.testing.assert_array_equal(run.hidden, play("standard", model, text(30), 6).hidden)
    assert run.hidden.dtype == np.float64


def test_derived_rows_may_be_dropped_at_any_time() -> None:
    """They are no state: every row follows from its residual."""
    model, local, prompt = weights("qwen3"), LocalFfn(weights("qwen3")), text(50)
    undisturbed = play("standard", model, prompt, 5)
    engine = residual("markov-rs:window=20")
    engine.prefill(model, local, prompt)
    for i, token in enumerate(undisturbed.tokens):
        engine.forget_derived()
        assert {kind.kind: kind.allocated for kind in engine.memory().kinds}["derived kv"] == 0
        row = engine.read_kv_row(1, 45 + i)
        assert row is not None
        np.testing.assert_array_equal(engine.decode_step(model, local, token)[0], undisturbed.hidden[i + 1])
        kept = engine.read_kv_row(1, 45 + i)
        assert kept is not None
        np.testing.assert_array_equal(row[0], kept[0])
    # Each step made the 30 + i cold rows and the 20 hot ones again.
    assert engine.stage_summary() == {
        "rows_computed": 55,
        "rows_cooled": 35,
        "rows_recomputed": sum(50 + i for i in range(5)),
    }


def test_a_window_bounds_hot_memory_and_not_attention() -> None:
    model = weights("llama")
    engine = play("markov-rs:window=16", model, text(100), 4).engine
    n_layer, row, kv = model.architecture.n_layer, 4 * 64, 4 * 2 * 2 * 32
    memory = engine.memory()
    assert (memory.reachable_tokens, memory.rows, engine.window_tokens) == (104, 104, None)
    assert {kind.kind: (kind.occupied, kind.cold) for kind in memory.kinds} == {
        "residual": (16 * row * n_layer, False),
        "derived kv": (16 * kv * n_layer, False),
        "cold residual": (88 * row * n_layer, True),
    }
    assert memory.cold_bytes == 88 * row * n_layer
    assert all(kind.allocated >= kind.occupied for kind in memory.kinds)
    # The hot tier does not grow with the text, allocated bytes included.
    hot = [kind.allocated for kind in memory.kinds if not kind.cold]
    longer = play("markov-rs:window=16", model, text(1000), 4).engine.memory()
    for kind, size in zip([kind for kind in longer.kinds if not kind.cold], hot, strict=True):
        assert kind.allocated <= 2 * size
    assert residual("markov-rs").memory().occupied_bytes == 0


def test_an_engine_that_projects_all_rows_at_every_step_says_so() -> None:
    assert not kv_engine("markov-rs").info.quadratic
    for spec in ("markov-rs:window=9", "markov-rs-codec", "boundary-per-layer"):
        assert kv_engine(spec).info.quadratic


@pytest.mark.parametrize(("spec", "row"), [("markov-rs-codec", 128), ("boundary-per-layer:codecs=q8_0", 68)])
def test_coded_rows_are_as_small_as_stated(spec: str, row: int) -> None:
    model = weights("llama")
    engine = play(f"{spec}{',' if ':' in spec else ':'}window=16", model, text(100), 4).engine
    assert engine.memory().cold_bytes == 88 * row * model.architecture.n_layer


@pytest.mark.parametrize(
    ("spec", "codecs"),
    [
        ("markov-rs-codec:window=24", "bf16"),
        ("boundary-per-layer:window=24,codecs=q8_0", "q8_0"),
        ("boundary-per-layer:window=24,codecs=f32x1+q8_0", "f32x1+q8_0"),
        ("boundary-per-layer:window=24,codecs=q8_0x1+f32x1", "q8_0x1+f32"),
    ],
)
def test_a_coded_engine_is_the_plain_rule_to_the_bit(spec: str, codecs: str) -> None:
    """Rows are encoded once, when they leave the window, each layer's by its own codec; nothing else differs."""
    model, prompt = weights("llama"), text(40)
    run = play(spec, model, prompt, 10)
    plain = PlainSession(model, cold_after=24, codecs=codecs)
    want = [plain.tokens(prompt, prompt=True), *[plain.tokens([token]) for token in run.tokens]]
    np.testing.assert_array_equal(run.hidden, np.stack(want))


def test_a_coded_engine_is_exact_within_its_window_and_in_the_prefill() -> None:
    model, prompt = weights("llama"), text(60)
    standard = play("standard", model, prompt, 6)
    for spec, same in [("markov-rs-codec:window=66", 7), ("markov-rs-codec:window=30", 1), ("boundary-per-layer", 7)]:
        run = play(spec, model, prompt, 6)
        equal = [bool(np.array_equal(a, b)) for a, b in zip(run.hidden, standard.hidden, strict=True)]
        assert equal == [True] * same + [False] * (7 - same)
        assert run.tokens == standard.tokens


def test_a_cold_row_reads_as_attention_reads_it() -> None:
    """That is, from what the codec left; and no better."""
    model, prompt = weights("llama"), text(60)
    exact, coded = play("standard", model, prompt, 0).engine, play("markov-rs-codec:window=9", model, prompt, 0).engine
    cold, theirs = coded.read_kv_row(1, 50), exact.read_kv_row(1, 50)
    assert cold is not None
    assert theirs is not None
    assert not np.array_equal(cold[0], theirs[0])
    np.testing.assert_allclose(cold[0], theirs[0], atol=0.05)
    hot, same = coded.read_kv_row(1, 51), exact.read_kv_row(1, 51)
    assert hot is not None
    assert same is not None
    np.testing.assert_array_equal(hot[0], same[0])


@pytest.mark.parametrize("spec", ["markov-rs", "markov-rs-codec", "boundary-per-layer:codecs=bf16"])
@pytest.mark.parametrize("what", ["a stateful norm", "learned positions", "latent attention"])
def test_a_model_with_a_history_is_refused_at_prefill(spec: str, what: str) -> None:
    model: Weights = copy.copy(weights("llama"))
    model.architecture = replace(model.architecture, history=(what,))
    engine = kv_engine(spec)
    with pytest.raises(ExecutionRefused, match=what) as refused:
        engine.prefill(model, LocalFfn(model), text(5))
    assert refused.value.kind == "unsupported"
    with pytest.raises(EmptyPrompt):
        engine.decode_step(model, LocalFfn(model), 5)
    kv_engine("standard").prefill(model, LocalFfn(model), text(5))


def test_a_model_whose_rows_do_not_give_its_keys_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its file says of itself: a norm that adds what earlier rows left is refused in the layer that has it."""

    def stateful(model: Weights, layer: int, x: np.ndarray, positions: np.ndarray) -> Qkv:
        q, k, v = qkv(model, layer, x, positions)
        return Qkv(q, k + np.cumsum(k, axis=0) * 1e-3 if layer == 1 else k, v)

    monkeypatch.setattr(dispatch, "qkv", stateful)
    model = weights("llama")
    kv_engine("standard").prefill(model, LocalFfn(model), text(8))
    with pytest.raises(ExecutionRefused, match="keys and values of layer 1 do not follow") as refused:
        kv_engine("markov-rs").prefill(model, LocalFfn(model), text(8))
    assert refused.value.kind == "unsupported"


@pytest.mark.parametrize(
    ("codecs", "message"),
    [
        ("bf16x3", "codecs bf16x3 are for 3 layers, and the model has 2"),
        ("bf16x1", "for 1 layers"),
        ("bf16x2+f32x1", "for 3 layers"),
        ("bf16x2+q8_0x1", "for 3 layers"),
    ],
)
def test_codecs_for_another_number_of_layers_are_refused(codecs: str, message: str) -> None:
    model = weights("llama")
    with pytest.raises(ExecutionRefused, match=message.replace("+", r"\+")):
        kv_engine(f"boundary-per-layer:codecs={codecs}").prefill(model, LocalFfn(model), text(5))
    kv_engine("boundary-per-layer:codecs=bf16x2").prefill(model, LocalFfn(model), text(5))
    kv_engine("boundary-per-layer:codecs=bf16x2+q8_0").prefill(model, LocalFfn(model), text(5))


@pytest.mark.parametrize("codecs", ["int8", "bf16+f32", "bf16x", "bf16x0", "", "+", "bf16x2+"])
def test_codecs_that_are_not_understood(codecs: str) -> None:
    with pytest.raises(UsageError, match=r"allowed: bf16, f32, q8_0|needs a number of layers"):
        parse_codec_policy(codecs)


@given(
    st.lists(st.tuples(st.sampled_from(sorted(CODECS)), st.integers(1, 40)), max_size=6), st.sampled_from(["", "f32"])
)
def test_a_policy_gives_each_layer_its_codec(runs: list[tuple[str, int]], rest: str) -> None:
    flat = [name for name, n in runs for _ in range(n)]
    written = "+".join([f"{name}x{n}" for name, n in runs] + [rest] * bool(rest)) or "f32"
    policy = parse_codec_policy(written)
    assert str(policy) == written
    n_layer = len(flat) + 5 * bool(rest)
    if n_layer:
        assert policy.obstacle(n_layer, 64) is None
        assert [codec.name for codec in policy.of(n_layer)] == flat + ["f32"] * (n_layer - len(flat))


def test_rows_that_do_not_fit_the_blocks_of_a_codec_are_refused() -> None:
    assert "q8_0 writes blocks of 32, and rows have 48" in str(parse_codec_policy("f32x1+q8_0").obstacle(4, 48))
    with pytest.raises(ExecutionRefused, match="q8_0 ends at"):
        CODECS["q8_0"].encode(np.full((1, 32), 1e7, np.float32))


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.floats(-20, 20), st.integers(1, 5))
def test_codecs_keep_to_their_bounds(seed: int, magnitude: float, n: int) -> None:
    rows = (np.random.default_rng(seed).standard_normal((n, 64)) * 2.0**magnitude).astype(np.float32)
    np.testing.assert_array_equal(CODECS["f32"].decode(CODECS["f32"].encode(rows), rows.dtype), rows)
    bf16 = CODECS["bf16"].decode(CODECS["bf16"].encode(rows), rows.dtype)
    assert (np.abs(bf16 - rows) <= np.abs(rows) * 2.0**-8).all()
    q8_0 = CODECS["q8_0"].decode(CODECS["q8_0"].encode(rows), rows.dtype)
    largest = np.abs(rows).reshape(n, 2, 32).max(axis=2).repeat(32, axis=1)
    assert (np.abs(q8_0 - rows) <= 4e-6 + largest / 200).all()
    for codec in CODECS.values():
        parts = np.concatenate([codec.encode(rows[i : i + 1]) for i in range(n)])
        np.testing.assert_array_equal(parts, codec.encode(rows))


@given(st.lists(st.tuples(st.sampled_from(["append", "truncate", "drop_first"]), st.integers(0, 60)), max_size=40))
def test_growing_rows_are_a_list(steps: list[tuple[str, int]]) -> None:
    rows, model, n_given = GrowingRows(np.empty((0, 2), np.int64)), [], 0
    for name, n in steps:
        if name == "append":
            new = np.arange(2 * n_given, 2 * (n_given + n)).reshape(n, 2)
            rows.append(new)
            model, n_given = model + new.tolist(), n_given + n
        else:
            getattr(rows, name)(n)
            model = model[:n] if name == "truncate" else model[n:]
        assert rows.view.tolist() == model
        assert len(rows) == len(model)
        assert rows.occupied_bytes == 16 * len(model) <= rows.allocated_bytes
