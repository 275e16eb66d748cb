"""The numpy reference against the naive float64 oracle, on random sessions of tiny models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvtape.backends.reference.model.weights import Weights
from kvtape.planner import residency
from kvtape.replay.covered import ModelNotCovered, covered_weights, key_storage
from kvtape.replay.dense import reference_logits
from kvtape.replay.lineage import LineageBuilder, prune
from support.oracle import OracleModel
from support.scripted import Script
from support.sessions import play_on_oracle, random_scripts
from support.tiny_gguf import write_tiny

N_VOCAB = 300
SHAPES = {
    "llama": {"arch": "llama", "n_head": 4, "n_head_kv": 2, "head_dim": 32},
    "llama-tied": {"arch": "llama", "tied": True},
    "qwen2": {"arch": "qwen2", "n_head": 4, "n_head_kv": 2, "head_dim": 32},
    "qwen3": {"arch": "qwen3"},
    "packed": {"arch": "llama", "weights": "q8_0"},
}
WAYS = st.sampled_from(["log", "recompute"])
slow_ok = settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))


@dataclass(frozen=True)
class Models:
    oracle: OracleModel
    single: Weights
    double: Weights


@pytest.fixture(scope="module", params=sorted(SHAPES))
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    path = write_tiny(tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf", **SHAPES[request.param])
    return Models(OracleModel(path), covered_weights(path), Weights(path, np.float64))


def build(script: Script, way: str) -> tuple[LineageBuilder, dict[tuple[int, int], int]]:
    """The lineage of a script and the slot of every (seq, tokens done)."""
    builder = LineageBuilder(way)  # type: ignore[arg-type]
    state, slots = residency.ResidencyState(), {}
    for event in script.events:
        state = residency.apply(state, event)
        row = script.tokens.get(event.seq)
        first = builder.step(event, state, row.tokens if row else None)
        if first is not None and row is not None:
            slots.update({(event.seq, k + 1): first + k for k in range(row.n_tokens)})
    return builder, slots


@given(script=random_scripts(N_VOCAB), way=WAYS)
@slow_ok
def test_reference_agrees_with_the_oracle(models: Models, script: Script, way: str) -> None:
    want = play_on_oracle(script.events, script.tokens, models.oracle, recompute=way == "recompute")
    builder, slots = build(script, way)
    keys = list(want)
    got = reference_logits(models.single, builder.lineage(), np.array([slots[k] for k in keys]))
    expected = np.stack([want[k] for k in keys])
    # float32: the tied model makes logits of up to 40, a fair share of whose last bits is 1e-5.
    atol = max(1e-5, 2e-6 * float(np.abs(expected).max()))
    np.testing.assert_allclose(got, expected, rtol=0, atol=atol)


def test_float64_is_exact_to_float32_output(models: Models) -> None:
    script = Script()
    script.prefill(list(range(3, 40)))
    script.evict(4, 20)
    script.decode([50, 51, 52])
    want = play_on_oracle(script.events, script.tokens, models.oracle)
    builder, slots = build(script, "log")
    last = (script.events[-1].seq, 3)
    got = reference_logits(models.double, builder.lineage(), np.array([slots[last]]))
    np.testing.assert_array_equal(got[0], want[last].astype(np.float32))


@given(script=random_scripts(N_VOCAB), way=WAYS, pick=st.integers(0, 10_000))
@slow_ok
def test_pruning_changes_no_number(models: Models, script: Script, way: str, pick: int) -> None:
    builder, slots = build(script, way)
    lineage = builder.lineage()
    wanted = np.array([sorted(slots.values())[pick % len(slots)]])
    pruned, renumbered = prune(lineage, wanted)
    assert pruned.n_slots <= lineage.n_slots
    assert pruned.tokens[renumbered] == lineage.tokens[wanted]
    everything = np.arange(lineage.n_slots)
    full = reference_logits(models.double, lineage, everything)[wanted[0]]
    np.testing.assert_allclose(reference_logits(models.double, pruned, renumbered)[0], full, rtol=1e-6)


def test_what_was_evicted_matters(models: Models) -> None:
    """The comparison has teeth: leaving an evict out moves the logits by far more than the tolerance."""
    logits = []
    for evicts in (True, False):
        script = Script()
        script.prefill(list(range(3, 40)))
        if evicts:
            script.evict(4, 20)
        script.decode([50, 51])
        builder, slots = build(script, "log")
        wanted = np.array([slots[script.events[-1].seq, 2]])
        logits.append(reference_logits(models.single, builder.lineage(), wanted))
    assert np.abs(logits[0] - logits[1]).max() > 0.01


def test_quantised_weights_are_dequantised(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "q8.gguf", weights="q8_0")
    script = Script()
    script.prefill([5, 9, 200, 31])
    want = play_on_oracle(script.events, script.tokens, OracleModel(path))
    builder, slots = build(script, "log")
    got = reference_logits(covered_weights(path), builder.lineage(), np.array([slots[1, 4]]))
    np.testing.assert_allclose(got[0], want[1, 4], atol=1e-5)
    assert key_storage(covered_weights(path)) == "quantised"
    assert key_storage(covered_weights(write_tiny(tmp_path / "f32.gguf"))) == "f32"
    assert key_storage(covered_weights(write_tiny(tmp_path / "f16.gguf", weights="f16"))) == "half"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ({"arch": "gemma3"}, "a sliding window of 64"),
        ({"arch": "lfm2"}, "architecture lfm2"),
    ],
)
def test_uncovered_models_are_refused(tmp_path: Path, overrides: dict[str, object], why: str) -> None:
    with pytest.raises(ModelNotCovered, match=why):
        covered_weights(write_tiny(tmp_path / "odd.gguf", **overrides))  # type: ignore[arg-type]
