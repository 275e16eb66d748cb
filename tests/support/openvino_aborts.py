"""A process of its own that writes rows back into OpenVINO's states: `python openvino_aborts.py MODEL KEYS VALUES`.

Computes rows in a cache of the types KEYS and VALUES, writes them back, computes on; again and again, as a damaged heap
shows when it is used. Prints `survived` if it lives. With u4 it does not.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from kvtape.backends.openvino.compiled import Profile
from kvtape.backends.openvino.graph_source import build_graph
from kvtape.backends.openvino.runner import Runner
from kvtape.backends.openvino.runtime import core

ROWS, ROUNDS = 40, 20


def main() -> None:
    """Compute, write back, compute; say so."""
    keys, values = sys.argv[2:]
    graph = build_graph(Path(sys.argv[1]))
    model = core().compile_model(graph.model, "CPU", Profile(keys, values, 1).properties())
    for _ in range(ROUNDS):
        runner = Runner(model, graph.shape)
        step = runner.step(np.full(ROWS, 7), np.arange(ROWS), np.empty(0, np.int64))
        runner.load(step.keys, step.values)
        runner.step(np.full(4, 7), np.arange(ROWS, ROWS + 4), np.arange(ROWS))
    print("survived")


if __name__ == "__main__":
    main()
