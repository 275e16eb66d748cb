"""Which model files the pipeline reads rightly: its own GGUF reader takes more than it understands, in silence.

It rounds the offsets of Q4_1 and Q4_K to whole numbers (another model, KL 0.29 to the file), leaves rope scaling and
sliding windows out, and knows three architectures. A folder with a graph that OpenVINO saved is taken as it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kvtape.backends.errors import UsageError
from kvtape.backends.fit import read_shape
from kvtape.capacity.model import ModelShape

__all__ = ["read_batching_shape"]

_ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
_MATRICES: Final = frozenset({"F16", "Q8_0", "Q4_0", "Q6_K"})
_VECTORS: Final = frozenset({"F32"})


def read_batching_shape(path: str | Path) -> ModelShape:
    """Raises UsageError for what the pipeline would not read, or would read as another model."""
    shape = read_shape(path)
    if Path(path).is_dir():
        return shape
    name = Path(path).name
    if shape.arch not in _ARCHITECTURES:
        raise UsageError(f"{name}: continuous batching reads {', '.join(_ARCHITECTURES)} files, not {shape.arch!r}")
    if shape.rope_scaling != "none" or shape.sliding_window:
        what = "a sliding window" if shape.sliding_window else f"rope scaling {shape.rope_scaling!r}"
        raise UsageError(
            f"{name}: continuous batching leaves {what} out without a word, so it computes another model"
            "; give another model"
        )
    wrong = sorted(shape.tensor_types - _MATRICES - _VECTORS)
    if wrong or not shape.tensor_types & _MATRICES:
        raise UsageError(
            f"{name}: continuous batching does not read {', '.join(wrong or ['F32'])} matrices rightly; give a file in "
            f"{', '.join(sorted(_MATRICES))}, or the folder of an OpenVINO model"
        )
    return shape
