"""A process of its own that measures what OpenVINO's KV states take: `python openvino_state_bytes.py MODEL TYPE...`.

A TYPE is one for both or KEYS/VALUES; bf16 is computed in too, as it is kept in no other way.

The state API shows values, never the storage, so the allocator is asked (glibc's mallinfo2). Tokens are fed in equal
steps. A step in which no buffer grows costs the same every time; one in which all double, from twice the rows at the
last growth to twice the rows now, costs that much more: the difference is storage of a known number of rows. Prints
JSON: for each type the bytes of one row over all layers, from the largest growth.
"""

from __future__ import annotations

import ctypes
import gc
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvtape.backends.openvino.compiled import Profile
from kvtape.backends.openvino.graph import SessionGraph
from kvtape.backends.openvino.graph_source import build_graph
from kvtape.backends.openvino.runner import Runner
from kvtape.backends.openvino.runtime import core

STEP, STEPS = 32, 8


_COUNTERS = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _Mallinfo(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_size_t) for name in _COUNTERS)


def main() -> None:
    """Feed, measure, print."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = _Mallinfo

    def allocated() -> int:
        gc.collect()
        info = libc.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    graph = build_graph(Path(sys.argv[1]), queries=False)
    print(json.dumps({kind: _row_bytes(graph, kind, allocated) for kind in sys.argv[2:]}))


def _row_bytes(graph: SessionGraph, kind: str, allocated: Callable[[], int]) -> float:
    keys, _, values = kind.partition("/")
    profile = Profile(keys, values or keys, 1, inference="bf16" if "bf16" in kind else "f32")
    model = core().compile_model(graph.model, "CPU", profile.properties())
    runner = Runner(model, graph.shape)
    growth: list[tuple[int, int]] = []
    steady: list[int] = []
    capacity, rows, before = 0, np.empty(0, np.int64), allocated()
    for _ in range(STEPS):
        new = np.arange(len(rows), len(rows) + STEP)
        runner.step(np.full(STEP, 7), new, rows)
        rows = np.concatenate([rows, new])
        after = allocated()
        if len(rows) > capacity:
            growth.append((2 * len(rows) - capacity, after - before))
            capacity = 2 * len(rows)
        else:
            steady.append(after - before)
        before = after
    more_rows, cost = growth[-1]
    return (cost - statistics.median(steady)) / more_rows


if __name__ == "__main__":
    main()
