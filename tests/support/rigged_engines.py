"""Real engines that can be made to take their process down, for hosts: loaders by name, and what each fault does.

`abort_next()` arms a session; the next prefill or the third token of the next decode then goes wrong in the way that
the option `rig` says. The native ones are misuse of the engine itself, of the kind that its guards keep away from it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvtape.backends.protocol import Backend, Choose, DecodeRun, Engine, Logits, ModelFacts, SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.testing.toy import ToyBackend, open_toy

__all__ = ["RIGS", "dies_while_loading", "load", "load_toy", "loads_forever"]


def load(name: str, path: str | Path, options: Mapping[str, str]) -> Engine:
    """The engine `name` with the fault of option `rig`."""
    left = dict(options)
    rig = RIGS[left.pop("rig")]
    return _RiggedEngine(open_engine(name, path, left), rig)


def dies_while_loading(name: str, path: str | Path, options: Mapping[str, str]) -> Engine:
    ctypes.string_at(0)
    raise AssertionError("survived")


def loads_forever(name: str, path: str | Path, options: Mapping[str, str]) -> Engine:
    time.sleep(3600)
    raise AssertionError("woke up")


def load_toy(name: str, path: str | Path, options: Mapping[str, str]) -> Engine:
    return _ToyEngine()


class _ToyEngine:
    name, version = "toy", "1"
    facts = ModelFacts("toy", "toy/1", "toy", 300, 1 << 20, frozenset())

    def tokenize(self, text: str) -> list[int]:
        if text == "slowly":
            time.sleep(3600)
        raise LookupError(f"no vocabulary for {text!r}")

    def detokenize(self, tokens: Sequence[int]) -> str:
        raise _OddError("odd")

    def open(self, config: SessionConfig) -> ToyBackend:
        return open_toy(config)

    def close(self) -> None:
        pass


class _OddError(Exception):
    """A class that the other process does not know."""


class _RiggedEngine:
    def __init__(self, inner: Engine, fault: Callable[[Any], object]) -> None:
        self._inner, self._fault = inner, fault

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def open(self, config: SessionConfig) -> Backend:
        rigged: Any = _Rigged(self._inner.open(config), self._fault)
        opened: Backend = rigged
        return opened


class _Rigged:
    def __init__(self, inner: Backend, fault: Callable[[Any], object]) -> None:
        self._inner, self._fault, self._armed = inner, fault, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def abort_next(self) -> None:
        self._armed = True

    def prefill(self, tokens: Sequence[int], tape_start: int) -> Any:
        if self._armed:
            return self._fault(self._inner)
        return self._inner.prefill(tokens, tape_start)

    def decode_until(self, n: int, limit: int, tape_start: int, logits: Logits, choose: Choose) -> DecodeRun:
        asked = 0

        def rigged(row: Logits) -> int | None:
            nonlocal asked
            asked += 1
            if self._armed and asked == 3:
                self._fault(self._inner)
            return choose(row)

        return self._inner.decode_until(n, limit, tape_start, logits, rigged)


def _bad_sequence(backend: Any) -> None:
    """A sequence id that llama.cpp asserts on."""
    from kvtape.backends.llama.native import library

    lib = library()
    lib.llama_memory_seq_rm(lib.llama_get_memory(backend._context._context), 999, 0, -1)


def _ungated_shift(backend: Any) -> None:
    """The shift that the gates keep from this model or these keys, applied as the session would."""
    backend._memory.shift(6, 8, 2)
    backend._memory.flush()


def _corrupt_heap(backend: Any) -> None:
    """OpenVINO takes states for 4-bit rows, and writes past their end."""
    import openvino as ov

    from kvtape.backends.openvino.graph_source import build_graph
    from kvtape.backends.openvino.runner import Runner
    from kvtape.backends.openvino.runtime import core

    graph = build_graph(Path(backend.facts.path))
    names = ("KV_CACHE_PRECISION", "KEY_CACHE_PRECISION", "VALUE_CACHE_PRECISION")
    runner = Runner(core().compile_model(graph.model, "CPU", dict.fromkeys(names, "u4")), graph.shape)
    runner.step(np.arange(3, 11), np.arange(8), np.empty(0, np.int64))
    for state in runner._request.query_state():
        state.state = ov.Tensor(np.array(state.state.data))
    for n in range(8, 64):
        runner.step(np.array([5]), np.array([n]), np.arange(n))


def _hang(backend: Any) -> None:
    """In native code, with the interpreter's lock: no other thread of the host runs either."""
    ctypes.PyDLL(None).sleep(3600)


def _garbage(backend: Any) -> None:
    from kvtape.backends.isolated.serving import SessionServer

    for server in [thing for thing in gc.get_objects() if isinstance(thing, SessionServer)]:
        server._sock.send(b"what damaged memory may say")
    time.sleep(3600)


RIGS: dict[str, Callable[[Any], object]] = {
    "segfault": lambda backend: ctypes.string_at(0),
    "abort": lambda backend: os.abort(),
    "out_of_memory": lambda backend: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda backend: os._exit(3),
    "bad_sequence": _bad_sequence,
    "ungated_shift": _ungated_shift,
    "corrupt_heap": _corrupt_heap,
    "hang": _hang,
    "garbage": _garbage,
    "wrong_type": lambda backend: {"logits": 1},
    "memory_error": lambda backend: np.empty(1 << 60, np.uint8),
}
