"""A compiled model, what it really does, and the sessions that share it.

All requests of one compiled model share its executable graph. A call that failed or was cancelled leaves that graph
in a state in which other requests fail, or answer wrongly without an error. So after such a call the compiled model
is dropped, made again, and every session is carried onto the new one. Made from its exported blob where that gives
the same numbers, bit by bit, else compiled anew: an imported RoPE that pairs halves forgets how, and the second half
of every key is memory that nobody wrote (OpenVINO 2026.4.1; on qwen2 and qwen3 a wrong number, not an error).
"""

from __future__ import annotations

import io
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.openvino.graph import GraphShape, last_line
from kvtape.backends.openvino.graph_source import build_graph
from kvtape.backends.openvino.rope import F32, PROBE_POSITIONS, PROBE_TOLERANCE, Rotation, find_rotation
from kvtape.backends.openvino.runner import Runner, StateFailed, States, Step, StepFailed
from kvtape.backends.openvino.runtime import core
from kvtape.backends.openvino.signal_stack import kept_signal_stack
from kvtape.backends.openvino.storage import Storage, ladder
from kvtape.capacity.model import ModelShape

__all__ = ["Compiled", "Passenger", "Profile"]

_DEVICE = "CPU"
_PROBE_TOKEN = 1


@dataclass(frozen=True, slots=True)
class Profile:
    """What a compiled model depends on: storage types of keys and values, threads, whether it shows its queries, and
    the type that it computes in."""

    kv_type_k: str
    kv_type_v: str
    threads: int
    queries: bool = False
    inference: str = "f32"

    @property
    def keys(self) -> Storage:
        return Storage(self.kv_type_k, self.inference)

    @property
    def values(self) -> Storage:
        return Storage(self.kv_type_v, self.inference)

    def properties(self) -> dict[str, str]:
        """Without activation quantisation. The general KV precision is ignored under ACCURACY; the two specific ones
        are honoured."""
        return {
            "INFERENCE_PRECISION_HINT": self.inference,
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
        self._n_ctx_train = model.n_ctx_train
        graph = build_graph(path, queries=profile.queries, n_ctx_train=model.n_ctx_train)
        self.shape: GraphShape = graph.shape
        self.profile = profile
        self._path = path
        self.lock = threading.RLock()
        self.imports = 0
        try:
            with kept_signal_stack():
                self._model = core().compile_model(graph.model, _DEVICE, profile.properties())
        except RuntimeError as err:
            raise EnvironmentProblem(
                f"{path.name}: OpenVINO cannot compile this model: {last_line(err)}"
                "; kvtape doctor --model FILE says what works here"
            ) from None
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
                raise EnvironmentProblem(
                    f"OpenVINO cannot open a session: {last_line(err)}; free some memory, or take a smaller context"
                ) from None
            self._passengers.append(weakref.ref(passenger))
            return runner

    def spare(self) -> Runner:
        """A request without rows, for as long as `lock` is held. Raises EnvironmentProblem."""
        with self.lock:
            try:
                return Runner(self._model, self.shape)
            except RuntimeError as err:
                raise EnvironmentProblem(
                    f"OpenVINO cannot open a second request: {last_line(err)}"
                    "; free some memory, or take a smaller context"
                ) from None

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
            raise EnvironmentProblem(
                f"{self._path.name}: OpenVINO cannot save this model: {last_line(err)}"
                "; free some space and memory, and run it again"
            ) from None
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
        graph = build_graph(self._path, queries=self.profile.queries, n_ctx_train=self._n_ctx_train)
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
        self._check_levels(runner)
        bases = (model.rope_base, 10000.0)
        tolerance = PROBE_TOLERANCE[self.profile.inference]
        found = find_rotation(
            step.keys, [int(p) for p in self._positions], model.rope_dims, bases, tolerance, model.rope_frequencies
        )
        if isinstance(found, str) and model.rope_scaling != "none":
            return f"{found}; the file declares {model.rope_scaling} rope scaling"
        return found

    def _check_storage(self, keys: F32, values: F32, states: States) -> None:
        """The engine's own answer about its storage type is not to be trusted; its rows are."""
        for what, rows, stored, storage in (
            ("keys", keys, states.keys, self.profile.keys),
            ("values", values, states.values, self.profile.values),
        ):
            if not np.array_equal(storage.stored(rows), np.stack(stored)):
                raise UsageError(
                    f"OpenVINO does not store {what} as {storage.kv_type} here (asked: keys {self.profile.kv_type_k}, "
                    f"values {self.profile.kv_type_v}, inference {self.profile.inference}); use kv=auto,inference=f32"
                )

    def _check_levels(self, runner: Runner) -> None:
        """Four rows tell a type, not how it rounds between two levels; rows written for that purpose do."""
        if "u8" not in (self.profile.kv_type_k, self.profile.kv_type_v):
            return
        shape = self.shape
        keys = ladder(shape.layers, shape.kv_heads, shape.head_dim_k)
        values = ladder(shape.layers, shape.kv_heads, shape.head_dim_v)
        try:
            runner.load(self.profile.keys.written(keys), self.profile.values.written(values))
            self._check_storage(keys, values, runner.states())
        except StateFailed as err:
            raise EnvironmentProblem(f"{self._path.name}: OpenVINO cannot take rows back as u8: {err}") from None


def _survives_import(rotation: Rotation | str) -> bool:
    """Only where it is known that no layer pairs halves: what an import makes of those is sometimes even right."""
    return isinstance(rotation, Rotation) and all(layer.pairs == "interleaved" for layer in rotation.layers)
