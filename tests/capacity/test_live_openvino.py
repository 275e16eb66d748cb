"""OpenVINO's states on the real model, measured through the allocator, and its block pool: ours, scales included."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai
import pytest

from kvtape.backends.errors import UsageError
from kvtape.capacity.allocation import CacheSettings
from kvtape.capacity.engines import Sizing, engine_rule
from kvtape.capacity.source import read_model_kv
from kvtape.cli.models import demo_model
from support import openvino_state_bytes
from support.openvino_tiny import tiny_session
from support.processor import computes_bf16, refused_here
from support.tiny_gguf import write_tiny

TYPES = ("f32", "f16", "u8")
ROW_BYTES = {"f32": 46_080, "f16": 23_040, "bf16": 23_040, "u8": 12_960, "u8/f32": 29_520}
"""Of the states, by keys/values, without their beam tables."""

BEAM_TABLE_BYTES = 4
"""Beside its rows every state has a table of one 32-bit beam a token."""


@pytest.fixture(scope="module")
def measured() -> dict[str, float]:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("what is measured is glibc's allocator")
    kinds = [kind for kind in ROW_BYTES if kind != "bf16" or computes_bf16()]
    script = Path(openvino_state_bytes.__file__)
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(script.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(script), str(demo_model()), *kinds],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        timeout=250,
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def refuses_bf16() -> None:
    """On a processor that does not compute in it nothing is measured, because no session opens."""
    with pytest.raises(UsageError) as caught:
        tiny_session(kv_type_k="bf16", kv_type_v="bf16", options={"kv": "asked"})
    assert refused_here(caught.value)


@pytest.mark.parametrize("kind", ROW_BYTES)
def test_state_bytes_of_the_real_model(measured: dict[str, float], kind: str) -> None:
    """A token's bytes, each with 60 beam tables; half a percent is the allocator's."""
    if kind not in measured:
        refuses_bf16()
        return
    model = read_model_kv(demo_model())
    keys, _, values = kind.partition("/")
    sizing = Sizing(model.geometry.stored_as(keys, values or keys), engine_rule("openvino"), CacheSettings())
    ours = sizing.total_bytes(1000) // 1000
    assert ours == ROW_BYTES[kind]
    assert measured[kind] - 2 * 30 * BEAM_TABLE_BYTES == pytest.approx(ours, rel=0.005)


def test_scales_could_not_be_left_out(measured: dict[str, float]) -> None:
    """Without them a u8 row would be a quarter of an f32 row."""
    tables = 2 * 30 * BEAM_TABLE_BYTES
    assert measured["u8"] - tables > 1.1 * (measured["f32"] - tables) / 4


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("head_dim", [32, 64])
def test_the_pool_of_continuous_batching(tmp_path: Path, kind: str, head_dim: int) -> None:
    """The pipeline's own metrics of a pool of 40 blocks, and the blocks that a sequence of 42 tokens takes."""
    path = write_tiny(tmp_path / "m.gguf", "llama", n_embd=256, n_head=4, n_head_kv=2, head_dim=head_dim, weights="f16")
    schedule = genai.SchedulerConfig()
    schedule.num_kv_blocks = 40
    precisions = dict.fromkeys(("KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION"), kind)
    pipe = genai.ContinuousBatchingPipeline(
        str(path), schedule, "CPU", precisions | {"INFERENCE_PRECISION_HINT": "f32"}
    )
    generation = genai.GenerationConfig()
    generation.max_new_tokens = 2
    handle = pipe.add_request(0, openvino.Tensor(np.arange(5, 45).reshape(1, -1)), generation)
    pipe.step()
    metrics = pipe.get_metrics()
    sizing = Sizing(read_model_kv(path).geometry.stored_as(kind, kind), engine_rule("openvino-cb"), CacheSettings())
    assert metrics.cache_size_in_bytes == sizing.total_bytes(40 * 32)
    in_use = metrics.cache_usage / 100 * metrics.cache_size_in_bytes
    assert in_use == pytest.approx(sizing.allocate(42).total_bytes)
    while pipe.has_non_finished_requests():
        pipe.step()
    assert handle.read_all()
