"""A compiled model, what it really does, and the sessions that share it.

All requests of one compiled model share its executable graph. A call that failed or was cancelled leaves that graph
in a state in which other requests fail, or answer wrongly without an error. So after such a call the compiled model
is dropped, imported again from its exported blob, and every session is carried onto the new one.
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
from kvtape.backends.openvino.graph import GraphShape, build_graph
from kvtape.backends.openvino.rope import F32, PROBE_POSITIONS, Rotation, find_rotation
from kvtape.backends.openvino.runner import Runner, States, StepFailed
from kvtape.capacity.model import ModelShape

__all__ = ["KV_TYPES", "Compiled", "Passenger", "Profile", "round_to"]

KV_TYPES = ("f16", "f32")
"""Storage types that a session can really get beside f32 inference; bf16 and mixed types silently become f32."""

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
    """`rotation` is how its keys rotate, or why that is unknown; `imports` counts revivals. Raises UsageError when
    `profile` cannot be had.

    `lock` is held while a request computes or states are written: a failure in one session replaces the requests of
    all others.
    """

    def __init__(self, path: Path, model: ModelShape, profile: Profile) -> None:
        graph = build_graph(path, queries=profile.queries)
        self.shape: GraphShape = graph.shape
        self.profile = profile
        self.lock = threading.RLock()
        self.imports = 0
        try:
            self._model = core().compile_model(graph.model, "CPU", profile.properties())
            blob = io.BytesIO()
            self._model.export_model(blob)
        except RuntimeError as err:
            raise EnvironmentProblem(f"{path.name}: OpenVINO cannot compile this model: {_last_line(err)}") from None
        self._blob = blob.getvalue()
        self._passengers: list[weakref.ref[Passenger]] = []
        self.rotation: Rotation | str = self._probe(path.name, model)

    def board(self, passenger: Passenger) -> Runner:
        """A request for a new session, which is carried along from now on. Raises EnvironmentProblem."""
        with self.lock:
            self._passengers = [ref for ref in self._passengers if ref() is not None]
            try:
                if self._model is None:
                    self._import()
                runner = Runner(self._model, self.shape)
            except RuntimeError as err:
                raise EnvironmentProblem(f"OpenVINO cannot open a session: {_last_line(err)}") from None
            self._passengers.append(weakref.ref(passenger))
            return runner

    def spare(self) -> Runner:
        """A request without rows, for as long as `lock` is held. Raises EnvironmentProblem."""
        with self.lock:
            try:
                return Runner(self._model, self.shape)
            except RuntimeError as err:
                raise EnvironmentProblem(f"OpenVINO cannot open a second request: {_last_line(err)}") from None

    def leave(self, passenger: Passenger) -> None:
        with self.lock:
            self._passengers = [ref for ref in self._passengers if ref() not in (None, passenger)]

    def revive(self) -> None:
        """Replace the poisoned compiled model and carry every session that is still aboard onto the new one."""
        with self.lock:
            self._model = None
            aboard = [passenger for ref in self._passengers if (passenger := ref()) is not None]
            try:
                self._import()
                runners = [Runner(self._model, self.shape) for _ in aboard]
            except (RuntimeError, MemoryError) as err:
                self._model = None
                for passenger in aboard:
                    passenger.strand(f"the compiled model could not be imported again: {_last_line(err)}")
                return
            for passenger, runner in zip(aboard, runners, strict=True):
                passenger.carry_over(runner)

    def _import(self) -> None:
        self._model = core().import_model(self._blob, "CPU", self.profile.properties())
        self.imports += 1

    def _probe(self, name: str, model: ModelShape) -> Rotation | str:
        """One token, seeing only itself, at several positions: shows the rotation and the true storage types."""
        positions = np.array([p for p in PROBE_POSITIONS if p < max(2, model.n_ctx_train)], np.int64)
        runner = Runner(self._model, self.shape)
        nothing = np.empty(0, np.int64)
        try:
            step = runner.step(np.full(len(positions), _PROBE_TOKEN), positions, nothing, alone=True)
        except StepFailed as err:
            raise EnvironmentProblem(f"{name}: OpenVINO cannot run this model: {err}") from None
        self._check_storage(step.keys, step.values, runner.states())
        bases = (model.rope_base, 10000.0)
        found = find_rotation(step.keys, [int(p) for p in positions], model.rope_dims, bases)
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


@functools.cache
def core() -> Any:
    """The one OpenVINO runtime of this process."""
    return ov.Core()


def _last_line(err: Exception) -> str:
    return next((line.strip() for line in reversed(str(err).splitlines()) if line.strip()), type(err).__name__)
