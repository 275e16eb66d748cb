"""OpenVINO sessions: a GGUF's graph made stateful, with a host mirror of every row."""

import sys

# `import openvino` reports its use to a web service, from a process that it forks beside running threads: a fork while
# BLAS computes in another thread never returns. Where openvino is not loaded yet, its reporter is taken out, which it
# has a substitute for.
if "openvino" not in sys.modules:
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
