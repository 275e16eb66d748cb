"""Loading the OpenVINO backend reports nothing to anybody."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, threading
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino import compiled, tokenizer
import openvino, openvino_genai
print(sys.modules["openvino_telemetry"], [t.name for t in threading.enumerate()])
"""


def test_no_reporter_is_loaded_no_thread_started_and_no_file_left_at_home(tmp_path: Path) -> None:
    # Outside CI, where openvino would otherwise report.
    environment = {k: v for k, v in os.environ.items() if k not in ("CI", "GITHUB_ACTIONS")} | {"HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=True, timeout=120
    )
    assert done.stdout.strip() == "None ['MainThread']"
    assert list(tmp_path.iterdir()) == []
