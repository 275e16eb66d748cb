"""Continuous batching, driven: what it says is right, what it would pass over in silence is an error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.batching.config import BLOCK, BatchingConfig, Eviction, read_eviction
from kvtape.backends.batching.files import read_batching_shape
from kvtape.backends.batching.isolated import IsolatedPipeline
from kvtape.backends.batching.occupancy import Step, block_bytes, blocks_in_use, first_evicted, resident_rows
from kvtape.backends.batching.pipeline import BatchingPipeline
from kvtape.backends.errors import (
    ContextOverflow,
    EngineFault,
    EnvironmentProblem,
    FatalClass,
    InputRejected,
    SessionClosed,
    UsageError,
)
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.cli.models import demo_model
from kvtape.planner.grammar import SpecError
from support.batching import N_CTX, PROMPT, batching_model, own_log_probs, pipeline
from support.openvino_ir import save_ir
from support.openvino_tiny import tokens
from support.tiny_gguf import write_tiny

EVICTION = Eviction(most=4 * BLOCK)


@pytest.fixture(scope="module")
def dense() -> Iterator[BatchingPipeline]:
    with pipeline() as native:
        yield native


def test_dense_it_says_what_our_own_session_says_of_the_same_tokens() -> None:
    with pipeline(chunk=128) as native:
        made = native.generate(PROMPT, 12)
        echoed = native.generate(PROMPT, 12, echo=True)
        other_length = native.generate(PROMPT[:77], 12)
    assert made.log_probs == pytest.approx(own_log_probs(PROMPT, made.tokens), abs=1e-4)
    assert echoed.prompt_log_probs == pytest.approx(own_log_probs(PROMPT[:1], PROMPT[1:]), abs=1e-4)
    assert (echoed.tokens, echoed.log_probs) == (made.tokens, made.log_probs)
    assert other_length.log_probs == pytest.approx(own_log_probs(PROMPT[:77], other_length.tokens), abs=1e-4)
    assert made.steps[:4] == (Step(128, 4), Step(256, 8), Step(300, 10), Step(301, 10))
    assert [step.rows for step in made.decoding] == [300 + i for i in range(12)]
    assert first_evicted(made.decoding) is None


def test_a_native_eviction_is_seen_block_by_block_and_changes_what_is_said_from_there_on() -> None:
    with pipeline(eviction=EVICTION) as native:
        made = native.generate(PROMPT, 40)
        again = native.generate(PROMPT, 40)
    assert again == made
    assert made.steps[0] == Step(256, 8)
    # 4 blocks and the one that is filled; full, one goes: rows run from most + 1 to most + a block.
    assert [step.rows for step in made.decoding[:2]] == [300, 301]
    assert {step.blocks for step in made.decoding[2:]} == {5}
    assert [step.rows for step in made.decoding[2:]] == [*range(142, 161), *range(129, 148)]
    dense = own_log_probs(PROMPT, made.tokens)
    since = first_evicted(made.decoding)
    assert since == 2
    assert made.log_probs[:since] == pytest.approx(dense[:since], abs=1e-4)
    assert np.abs(np.subtract(made.log_probs[since:], dense[since:])).max() > 0.05


def test_a_prompt_that_is_cached_takes_fewer_steps_and_says_the_same() -> None:
    with pipeline(chunk=64, prefix_caching=True) as native:
        first, second = (native.generate(PROMPT, 4) for _ in range(2))
    assert [step.tokens for step in first.steps] == [64, 128, 192, 256, 300, 301, 302, 303]
    assert [step.tokens for step in second.steps] == [300, 301, 302, 303]
    assert second.tokens == first.tokens
    assert second.log_probs == pytest.approx(first.log_probs, abs=1e-4)


def test_a_text_is_forced_and_its_log_probabilities_stay_those_of_the_whole_vocabulary(dense: BatchingPipeline) -> None:
    text = 'the cache\n"holds" \\ the keys and the values'
    made = dense.generate(PROMPT, 20, text=text)
    said = dense.decode(made.tokens)
    with pytest.raises(InputRejected, match="is over before 20 tokens"):
        dense.generate(PROMPT, 20, text="ab")
    assert text.startswith(said)
    assert len(said) >= 10
    assert made.log_probs == pytest.approx(own_log_probs(PROMPT, made.tokens), abs=1e-4)


@pytest.mark.parametrize(("blocks", "n", "got"), [(5, 8, 0), (10, 40, 21)])
def test_a_cache_that_is_too_small_is_an_error_with_both_numbers(blocks: int, n: int, got: int) -> None:
    with pipeline(blocks) as native:
        with pytest.raises(ContextOverflow, match=f"was full after {got} new tokens .status IGNORED.") as raised:
            native.generate(PROMPT, n)
        assert (raised.value.needed, raised.value.available) == (300 + n, blocks * BLOCK)
        assert len(native.generate(PROMPT[:40], 4).tokens) == 4


@pytest.mark.parametrize(
    ("prompt", "n", "error", "says"),
    [
        ((), 4, InputRejected, "the prompt is empty"),
        ((5, 99_999_999), 4, InputRejected, "token 99999999"),
        ((5, -3), 4, InputRejected, "token -3"),
        ((5, 2**40), 4, InputRejected, "token 1099511627776"),
        (PROMPT, 0, InputRejected, "0 tokens are asked for"),
        (PROMPT * 7, 4, ContextOverflow, f"2104 tokens do not fit a context of {N_CTX}"),
    ],
)
def test_what_it_would_take_in_silence_is_refused(
    dense: BatchingPipeline, prompt: tuple[int, ...], n: int, error: type, says: str
) -> None:
    with pytest.raises(error, match=says):
        dense.generate(prompt, n)


def test_a_failure_inside_is_typed_and_the_next_request_runs_on_a_pipeline_made_anew(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pipeline(eviction=Eviction(most=128, aggregation="adaptive_rkv")) as native:
        for _ in range(2):
            with pytest.raises(EngineFault, match="Token diversity must be registered") as raised:
                native.generate(PROMPT, 8)
            assert raised.value.fatal_class is FatalClass.DECODE_FAILED
        # A prompt that fits its budget is never evicted from.
        assert len(native.generate(PROMPT[:40], 4).tokens) == 4
    with pytest.raises(SessionClosed):
        native.generate(PROMPT, 1)
    # A request that is dropped without being cancelled makes the pipeline complain when it goes.
    assert "leaked" not in capfd.readouterr().err


@pytest.mark.parametrize("kv_type", ["f32", "f16", "u8"])
def test_the_storage_type_is_the_one_that_was_asked_for(kv_type: str) -> None:
    """By default it would be u8."""
    with pipeline(kv_type=kv_type) as native:
        made = native.generate(PROMPT, 4)
        one_block = block_bytes(native.shape, kv_type)
    furthest = np.abs(np.subtract(made.log_probs, own_log_probs(PROMPT, made.tokens))).max()
    least, most = {"f32": (0, 1e-5), "f16": (1e-6, 1e-3), "u8": (1e-3, 0.5)}[kv_type]
    assert least <= furthest <= most
    assert one_block == {"f32": 32 * 2 * 2 * 32 * 4, "f16": 32 * 2 * 2 * 32 * 2, "u8": None}[kv_type]


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: Eviction(start=20), "start=20 is not a multiple of its block of 32"),
        (lambda: Eviction(recent=0), "recent=0 is not a multiple"),
        (lambda: Eviction(most=64), "most=64 leaves nothing to choose.*raise it to 96"),
        (lambda: BatchingConfig(8, kv_type="bf16"), "cannot store rows as 'bf16'; ask for f32, f16, u8"),
        (lambda: BatchingConfig(0), "all at least 1"),
        (lambda: read_eviction("continuous-batching"), "names no most"),
        (lambda: read_eviction("vllm:most=64"), "unknown comparator 'vllm'"),
        (
            lambda: read_eviction("continuous-batching:most=128,rotation=yes"),
            "option of continuous-batching 'rotation'",
        ),
        (lambda: read_eviction("continuous-batching:most=128,aggregation=max"), "adaptive_rkv"),
    ],
)
def test_what_cannot_be_configured_is_refused(made: Any, says: str) -> None:
    with pytest.raises((UsageError, SpecError), match=says):
        made()


def test_a_spec_reads_back_as_what_it_says() -> None:
    text = "continuous-batching:start=64,recent=32,most=256,aggregation=sum,window=0,crush=2"
    assert read_eviction(text).label == text
    assert read_eviction(text).peak == 256 + 3 * BLOCK
    assert read_eviction("continuous-batching", 128) == EVICTION


def test_files_that_it_would_misread_are_refused(tmp_path: Path) -> None:
    plain = write_tiny(tmp_path / "f32.gguf")
    yarn = write_tiny(tmp_path / "yarn.gguf", weights="f16", yarn=4)
    gemma = write_tiny(tmp_path / "gemma.gguf", "gemma3", weights="f16")
    half = tmp_path / "half.gguf"
    half.write_bytes(batching_model().read_bytes()[: batching_model().stat().st_size // 2])
    for path, says in (
        (plain, "does not read F32 matrices rightly; give a file in F16, Q4_0, Q6_K, Q8_0, or the folder"),
        (yarn, "leaves rope scaling 'yarn' out without a word"),
        (gemma, "reads llama, qwen2, qwen3 files, not 'gemma3'"),
        (demo_model(), "does not read Q4_1 matrices rightly"),
        (half, "half.gguf"),
        (tmp_path / "none.gguf", "no such model file"),
    ):
        with pytest.raises(UsageError, match=says):
            read_batching_shape(path)
    for weights in ("f16", "q8_0", "q4_0"):
        assert read_batching_shape(write_tiny(tmp_path / f"{weights}.gguf", weights=weights)).n_layer == 2


def test_a_model_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    folder = save_ir(batching_model(), tmp_path / "ir", N_CTX)
    with BatchingPipeline(folder, BatchingConfig(64)) as native:
        made = native.generate(PROMPT, 8)
    engine = OpenVinoEngine.load(folder)
    assert made.log_probs == pytest.approx(own_log_probs(PROMPT, made.tokens, engine), abs=1e-4)
    # Saving rounds the vectors, so it is not quite the file that it was made from.
    assert made.log_probs == pytest.approx(own_log_probs(PROMPT, made.tokens), abs=0.05)
    engine.close()


def test_a_process_that_dies_is_an_error_and_the_next_request_starts_another() -> None:
    with IsolatedPipeline(batching_model(), BatchingConfig(64, eviction=EVICTION)) as native:
        made = native.generate(PROMPT, 6)
        assert native.version.startswith("20")
        process = native._process
        assert process is not None
        process.kill()
        with pytest.raises(EngineFault, match=r"device_lost.*died of SIGKILL in generate"):
            native.generate(PROMPT, 6)
        assert native.generate(PROMPT, 6) == made
        with pytest.raises(ContextOverflow, match=r"3004 tokens"):
            native.generate(tokens(3000), 4)
    with pipeline(eviction=EVICTION) as here:
        assert here.generate(PROMPT, 6) == made
    with pytest.raises(UsageError, match="no such model file"):
        IsolatedPipeline("nowhere.gguf", BatchingConfig(64))


@given(st.integers(1, 4096), st.integers(1, 10**6), st.data())
def test_blocks_come_back_from_a_share_and_a_size(total: int, one_block: int, data: st.DataObject) -> None:
    used = data.draw(st.integers(0, total))
    percent = float(np.float32(100 * used / total))
    assert blocks_in_use(percent, total * one_block, one_block) == used


@given(st.integers(2, 500), st.integers(0, 499), st.floats(0.1, 0.9))
def test_a_share_that_is_no_whole_number_of_blocks_is_an_error(total: int, used: int, part: float) -> None:
    with pytest.raises(EnvironmentProblem, match="no whole number"):
        blocks_in_use(100 * (min(used, total - 1) + part) / total, total * 64, 64)


@given(st.integers(1, 10_000), st.integers(0, 300))
def test_rows_are_the_tokens_less_whole_blocks(n: int, gone: int) -> None:
    held = -(-n // BLOCK)
    left = max(1, held - gone)
    rows = resident_rows(n, left)
    assert rows == n - BLOCK * (held - left)
    # What is left is full but for the block that is being filled.
    assert BLOCK * (left - 1) < rows <= BLOCK * left
