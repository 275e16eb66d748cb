"""A process of its own that rotates keys which llama.cpp cannot: `python llama_aborts.py MODEL KEYS VALUES FLASH`.

Opens a context, computes, removes a range and moves the rows behind it, as a session would, past every gate. Prints how
far it came.
"""

from __future__ import annotations

import sys

import numpy as np

from kvtape.backends.llama.context import LIVE, ContextParams, NativeContext
from kvtape.backends.llama.native import NativeModel

ROWS = 40


def main() -> None:
    """Compute, remove, move; say so."""
    path, keys, values, flash = sys.argv[1:]
    params = ContextParams(256, 64, 64, keys, values, flash, 1, True)  # type: ignore[arg-type]
    context = NativeContext(NativeModel(path), params)
    assert context.decode(np.full(ROWS, 7, np.int32), 0, LIVE, want_logits=False) == 0
    print("computed", flush=True)
    assert context.remove(LIVE, 10, 20)
    context.add(LIVE, 20, ROWS, -10)
    assert context.decode(np.full(1, 7, np.int32), ROWS - 10, LIVE, want_logits=False) == 0
    print("rotated")


if __name__ == "__main__":
    main()
