"""Loading the OpenVINO backend, or the comparator, reports nothing to anybody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.batching import batching_model

SAID = "print(sys.modules['openvino_telemetry'], [t.name for t in threading.enumerate()])"
BACKEND = f"""
import sys, threading
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino import compiled, tokenizer
import openvino, openvino_genai
{SAID}
"""
COMPARATOR = f"""
import sys, threading
from kvtape.eval.batching import compare, proofs
from kvtape.backends.batching.config import BatchingConfig
from kvtape.backends.batching.pipeline import BatchingPipeline
with BatchingPipeline(sys.argv[1], BatchingConfig(4)) as pipeline:
    assert len(pipeline.generate([5, 6, 7], 2).tokens) == 2
{SAID}
"""
HOST = f"""
import sys, threading
from kvtape.backends.batching import host
import openvino, openvino_genai
{SAID}
"""


@pytest.mark.parametrize("program", [BACKEND, COMPARATOR, HOST], ids=["backend", "comparator", "host"])
def test_no_reporter_is_loaded_no_thread_started_and_no_file_left_at_home(program: str, tmp_path: Path) -> None:
    # Outside CI, where openvino would otherwise report.
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "GITHUB_ACTIONS")} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program, str(batching_model())],
        capture_output=True, text=True, env=environment, check=True, timeout=120,
    )  # fmt: skip
    assert done.stdout.strip() == "None ['MainThread']"
    assert list(tmp_path.iterdir()) == []
