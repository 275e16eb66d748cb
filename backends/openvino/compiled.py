"""A compiled model, what it really does, and the sessions that share it.

All requests of one compiled model share its executable graph. A call that failed or was cancelled leaves that graph
in a state in which other requests fail, or answer wrongly without an error. So after such a call the compiled model
is dropped, made again, and every session is carried onto the new one. Made from its exported blob where that gives
the same numbers, bit by bit, else compiled anew: an imported RoPE that pairs halves forgets how, and the second half
of every key is memory that nobody wrote (OpenVINO 2026.4.1; on qwen2 and qwen3 a wrong number, not an error).
"""

from __future__ import annotations

import functools
import io
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import openvino as ov

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.openvino.graph import GraphShape, last_line
from kvtape.backends.openvino.graph_source import build_graph
from kvtape.backends.openvino.rope import F32, PROBE_POSITIONS, Rotation, find_rotation
from kvtape.backends.openvino.runner import Runner, States, Step, StepFailed
from kvtape.backends.openvino.signal_stack import kept_signal_stack
from kvtape.capacity.model import ModelShape

__all__ = ["KV_TYPES", "Compiled", "Passenger", "Profile", "round_to"]

KV_TYPES = ("f16", "f32")
"""Storage types that a session can really get beside f32 inference; bf16 and mixed types silently become f32."""

_DEVICE = "CPU"
_PROBE_TOKEN = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """What a compiled model depends on: storage types of keys and values, threads, and whether it shows its queries."""

    kv_type_k: str
    kv_type_v: str
    threads: int
    queries: bool = False

    def properties(self) -> dict[str, str]:
        """The exact profile: f32 inference without activation quantisation. The general KV precision is ignored
        under ACCURACY; the two specific ones are honoured."""
        return {
            "INFERENCE_PRECISION_HINT": "f32",
            "EXECUTION_MODE_HINT": "ACCURACY",
            "KV_CACHE_PRECISION": self.kv_type_k,
            "KEY_CACHE_PRECISION": self.kv_type_k,
            "VALUE_CACHE_PRECISION": self.kv_type_v,
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": str(self.threads),
        }


class Passenger(Protocol):
    """A session on a compiled model. Neither method raises: what goes wrong is that session's own failure."""

    def carry_over(self, runner: Runner) -> None:
        """Go on with `runner`, a fresh request, and the rows it had."""

    def strand(self, reason: str) -> None:
        """There is no compiled model to go on with."""


class Compiled:
    """`rotation` is how its keys rotate, or why that is unknown; `imports` counts how often it was made again. Raises
    UsageError when `profile` cannot be had.

    `lock` is held while a request computes or states are written: a failure in one session replaces the requests of
    all others.
    """

    def __init__(self, path: Path, model: ModelShape, profile: Profile) -> None:
        graph = build_graph(path, queries=profile.queries)
        self.shape: GraphShape = graph.shape
        self.profile = profile
        self._path = path
        self.lock = threading.RLock()
        self.imports = 0
        try:
            with kept_signal_stack():
                self._model = core().compile_model(graph.model, _DEVICE, profile.properties())
        except RuntimeError as err:
            raise EnvironmentProblem(f"{path.name}: OpenVINO cannot compile this model: {last_line(err)}") from None
        self._passengers: list[weakref.ref[Passenger]] = []
        self._positions = np.array([p for p in PROBE_POSITIONS if p < max(2, model.n_ctx_train)], np.int64)
        self.rotation: Rotation | str = self._probe(path.name, model)
        self._blob = self._export() if _survives_import(self.rotation) else None

    def board(self, passenger: Passenger) -> Runner:
        """A request for a new session, which is carried along from now on. Raises EnvironmentProblem."""
        with self.lock:
            self._passengers = [ref for ref in self._passengers if ref() is not None]
            try:
                if self._model is None:
                    self._make_again()
                runner = Runner(self._model, self.shape)
            except RuntimeError as err:
                raise EnvironmentProblem(f"OpenVINO cannot open a session: {last_line(err)}") from None
            self._passengers.append(weakref.ref(passenger))
            return runner

    def spare(self) -> Runner:
        """A request without rows, for as long as `lock` is held. Raises EnvironmentProblem."""
        with self.lock:
            try:
                return Runner(self._model, self.shape)
            except RuntimeError as err:
                raise EnvironmentProblem(f"OpenVINO cannot open a second request: {last_line(err)}") from None

    def leave(self, passenger: Passenger) -> None:
        with self.lock:
            self._passengers = [ref for ref in self._passengers if ref() not in (None, passenger)]

    def revive(self) -> None:
        """Replace the poisoned compiled model and carry every session that is still aboard onto the new one.

        One that could not be carried is stranded, also where an interrupt ends this half way: its request is of the
        old model, and may hold rows of a call that never ended.
        """
        with self.lock:
            self._model, made = None, False
            waiting = [passenger for ref in self._passengers if (passenger := ref()) is not None]
            try:
                self._make_again()
                runners = [Runner(self._model, self.shape) for _ in waiting]
                made = True
                for runner in runners:
                    waiting[0].carry_over(runner)
                    del waiting[0]
            except BaseException as err:
                if not made:
                    self._model = None
                for passenger in waiting:
                    passenger.strand(f"the compiled model could not be made again: {last_line(err)}")
                if not isinstance(err, (RuntimeError, MemoryError, EnvironmentProblem)):
                    raise

    def _export(self) -> bytes:
        blob = io.BytesIO()
        try:
            self._model.export_model(blob)
        except RuntimeError as err:
            raise EnvironmentProblem(f"{self._path.name}: OpenVINO cannot save this model: {last_line(err)}") from None
        return blob.getvalue()

    def _make_again(self) -> None:
        """A fresh compiled model. Raises RuntimeError, MemoryError and EnvironmentProblem."""
        self.imports += 1
        if self._blob is not None:
            with kept_signal_stack():
                self._model = core().import_model(self._blob, _DEVICE, self.profile.properties())
            if self._same_numbers():
                return
            self._model = self._blob = None
        graph = build_graph(self._path, queries=self.profile.queries)
        with kept_signal_stack():
            self._model = core().compile_model(graph.model, _DEVICE, self.profile.properties())

    def _same_numbers(self) -> bool:
        """Whether the model computes what it did when it was new, to the bit."""
        try:
            now = self._step_alone(Runner(self._model, self.shape))
        except StepFailed:
            return False
        then = self._first
        pairs = [(now.logits, then.logits), (now.keys, then.keys), (now.values, then.values)]
        if now.queries is not None and then.queries is not None:
            pairs.append((now.queries, then.queries))
        return all(np.array_equal(a, b) for a, b in pairs)

    def _step_alone(self, runner: Runner) -> Step:
        """One token, seeing only itself, at several positions."""
        nothing = np.empty(0, np.int64)
        return runner.step(np.full(len(self._positions), _PROBE_TOKEN), self._positions, nothing, alone=True)

    def _probe(self, name: str, model: ModelShape) -> Rotation | str:
        """Shows the rotation and the true storage types."""
        runner = Runner(self._model, self.shape)
        try:
            step = self._first = self._step_alone(runner)
        except StepFailed as err:
            raise EnvironmentProblem(f"{name}: OpenVINO cannot run this model: {err}") from None
        self._check_storage(step.keys, step.values, runner.states())
        bases = (model.rope_base, 10000.0)
        found = find_rotation(step.keys, [int(p) for p in self._positions], model.rope_dims, bases)
        if isinstance(found, str) and model.rope_scaling != "none":
            return f"{found}; the file declares {model.rope_scaling} rope scaling"
        return found

    def _check_storage(self, keys: F32, values: F32, states: States) -> None:
        """The engine's own answer about its storage type is not to be trusted; its rows are."""
        for what, rows, stored, kv_type in (
            ("keys", keys, states.keys, self.profile.kv_type_k),
            ("values", values, states.values, self.profile.kv_type_v),
        ):
            if not np.array_equal(round_to(rows, kv_type), np.stack(stored)):
                raise UsageError(
                    f"OpenVINO does not store {what} as {kv_type} here (asked: keys {self.profile.kv_type_k}, values "
                    f"{self.profile.kv_type_v}); use kv=auto for f32"
                )


def round_to(rows: F32, kv_type: str) -> F32:
    """`rows` as they read back from a store of `kv_type`."""
    return rows.astype(np.float16).astype(np.float32) if kv_type == "f16" else rows


def _survives_import(rotation: Rotation | str) -> bool:
    """Only where it is known that no layer pairs halves: what an import makes of those is sometimes even right."""
    return isinstance(rotation, Rotation) and all(layer.pairs == "interleaved" for layer in rotation.layers)


@functools.cache
def core() -> Any:
    """The one OpenVINO runtime of this process."""
    return ov.Core()
