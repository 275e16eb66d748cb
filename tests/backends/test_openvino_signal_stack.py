"""Compiling a model leaves the thread's signal stack alone, so that Ctrl-C is safe afterwards."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.tiny_gguf import write_tiny

OPENS = """
import faulthandler, sys
from pathlib import Path
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.signal_stack import signal_stack
from kvtape.backends.protocol import SessionConfig
if sys.argv[2] == "handled":
    faulthandler.enable()
before = signal_stack()
engine = OpenVinoEngine.load(Path(sys.argv[1]), {})
session = engine.open(SessionConfig(n_ctx=256))
session.prefill([1, 2, 3], 0)
print(before == signal_stack(), (before is None) == (sys.argv[2] == "plain" or sys.platform != "linux"))
"""


@pytest.mark.parametrize("how", ["plain", "handled"])
def test_a_compiled_model_leaves_the_signal_stack(tmp_path: Path, how: str) -> None:
    model = write_tiny(tmp_path / "m.gguf")
    ran = subprocess.run([sys.executable, "-c", OPENS, str(model), how], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["True", "True"]
