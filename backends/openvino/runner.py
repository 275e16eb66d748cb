"""One OpenVINO infer request: feeding it, stopping it, and reading and writing its KV states.

Nothing is checked natively that matters here (ids, positions, state lengths), so callers hand in validated input and
every call is followed by a check of the row counts. After `StepFailed` or `StepCancelled` the compiled model behind
the request must not compute again: its graph keeps shapes of the failed call and may go on with wrong numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov

from kvtape.backends.openvino.graph import GraphShape
from kvtape.backends.openvino.rope import F32, I64

__all__ = ["Runner", "StateFailed", "States", "Step", "StepCancelled", "StepFailed"]

_POLL_MS = 20


class StepFailed(Exception):
    """The engine raised, or its answer does not fit the books; `allocation` when it ran out of memory."""

    def __init__(self, message: str, *, allocation: bool = False) -> None:
        super().__init__(message)
        self.allocation = allocation


class StepCancelled(Exception):
    """The call was stopped from outside."""


class StateFailed(Exception):
    """The engine refused a state, or holds another number of rows than it was given."""


@dataclass(frozen=True, slots=True)
class Step:
    """`logits` `[n_vocab]` after the last token, or `[T, n_vocab]` after each; new rows
    `[layers, T, kv_heads, head_dim]`; queries `[layers, T, heads, head_dim]` where the graph shows them."""

    logits: F32
    keys: F32
    values: F32
    queries: F32 | None = None


@dataclass(frozen=True, slots=True)
class States:
    """All rows of the engine, per layer `[n, kv_heads, head_dim]`; layers may differ in n when faulty."""

    keys: tuple[F32, ...]
    values: tuple[F32, ...]


class Runner:
    def __init__(self, compiled_model: Any, shape: GraphShape) -> None:
        self._request = compiled_model.create_infer_request()
        self._inputs = frozenset(next(iter(port.get_names())) for port in compiled_model.inputs)
        self._queries = any("q_rows" in port.get_names() for port in compiled_model.outputs)
        self._shape = shape
        states = {state.name: state for state in self._request.query_state()}
        self._keys = [states[f"cache_k_l{layer}"] for layer in range(shape.layers)]
        self._values = [states[f"cache_v_l{layer}"] for layer in range(shape.layers)]

    def step(
        self,
        tokens: I64,
        positions: I64,
        key_positions: I64,
        *,
        stop: Callable[[], bool] = lambda: False,
        alone: bool = False,
        spoil: bool = False,
        each: bool = False,
    ) -> Step:
        """Compute `tokens` `[T]` at cache `positions` `[T]` behind the rows at `key_positions` `[n]`.

        Each token sees the rows, old and new, at its own or a smaller position; `alone`: only itself. `spoil` makes
        the mask one column too wide, which the runtime refuses. `each` asks for the logits after every token. `stop` is
        polled while the engine works. Raises StepFailed, StepCancelled.
        """
        try:
            asked = np.arange(0 if each else len(tokens) - 1, len(tokens))
            feed = self._feed(tokens, positions, np.concatenate([key_positions, positions]), asked, alone, spoil)
            self._run(feed, stop)
            step = self._answer(len(asked), each=each)
        except (RuntimeError, MemoryError) as err:
            text = str(err)
            allocation = isinstance(err, MemoryError) or "allocate" in text or "bad_alloc" in text
            raise StepFailed(_short(text), allocation=allocation) from err
        self._check_answer(step, len(tokens), len(key_positions) + len(tokens))
        return step

    def _feed(self, tokens: I64, positions: I64, keys: I64, asked: I64, alone: bool, spoil: bool) -> dict[str, Any]:
        n_new, n_old = len(tokens), len(keys) - len(tokens)
        visible = keys[None, :] <= positions[:, None]
        if alone:
            visible = np.arange(len(keys))[None, :] == n_old + np.arange(n_new)[:, None]
        if spoil:
            visible = np.pad(visible, ((0, 0), (0, 1)))
        feed = {
            "inp_tokens": _wide(tokens),
            "inp_pos": _wide(positions),
            "inp_out_ids": _wide(asked),
            "inp_kv_idx": _wide(np.arange(n_old, n_old + n_new)),
            "token_len_per_seq": np.array([n_new], np.int64),
            "beam_idx": np.zeros(1, np.int32),
            "self_kq_mask": _mask(visible),
        }
        return {name: value for name, value in feed.items() if name in self._inputs}

    def _run(self, feed: dict[str, Any], stop: Callable[[], bool]) -> None:
        """Only this thread ever touches the request, so a stop cannot race with the end of the call."""
        try:
            self._request.start_async(feed, share_inputs=True)
            while not self._request.wait_for(_POLL_MS):
                if stop():
                    raise StepCancelled
            self._request.wait()
        except RuntimeError:
            raise
        except BaseException:  # StepCancelled, and an interrupt that arrives while the engine works
            self._request.cancel()
            # "Infer Request was canceled"; if it had just ended, the caller discards it all the same.
            with contextlib.suppress(RuntimeError):
                self._request.wait()
            raise

    def _answer(self, n_asked: int, *, each: bool) -> Step:
        def rows(name: str) -> F32:
            return np.array(self._request.get_tensor(name).data.transpose(0, 2, 1, 3), np.float32, order="C")

        found = self._request.get_tensor("logits").data[0, 0]
        if len(found) != n_asked:
            raise RuntimeError(f"the engine gave logits of {len(found)} tokens, not {n_asked}")
        logits = np.array(found if each else found[0], np.float32)
        return Step(logits, rows("k_rows"), rows("v_rows"), rows("q_rows") if self._queries else None)

    def _check_answer(self, step: Step, n_new: int, n_rows: int) -> None:
        if step.keys.shape[1] != n_new or step.values.shape[1] != n_new:
            raise StepFailed(f"{step.keys.shape[1]} key and {step.values.shape[1]} value rows came for {n_new} tokens")
        given = (step.logits, step.keys, step.values, *(() if step.queries is None else (step.queries,)))
        if not all(np.isfinite(numbers).all() for numbers in given):
            raise StepFailed("the engine's logits or rows are not finite")
        if self.row_counts() != (n_rows, n_rows):
            raise StepFailed(f"the engine holds {self.row_counts()} rows (first keys, last values), not {n_rows}")

    def row_counts(self) -> tuple[int, int]:
        """Rows of the first layer's keys and of the last layer's values: the two ends of the graph."""
        first, last = self._keys[0].state.shape, self._values[-1].state.shape
        return int(first[2]), int(last[2])

    def load(self, keys: F32, values: F32, *, spoil: bool = False) -> None:
        """Make these rows the whole state: `[layers, n, kv_heads, head_dim]` f32.

        `spoil` gives the last layer's values one head too many, which the runtime refuses after the layers before it
        were set. Raises StateFailed; the state is then mixed and the request must be dropped.
        """
        shape = self._shape
        n = keys.shape[1]
        want = (shape.layers, n, shape.kv_heads)
        if keys.shape != (*want, shape.head_dim_k) or values.shape != (*want, shape.head_dim_v):
            raise StateFailed(f"rows of shape {keys.shape} and {values.shape} do not fit {want}")
        if keys.dtype != np.float32 or values.dtype != np.float32:
            raise StateFailed(f"rows are {keys.dtype} and {values.dtype}, not float32")
        try:
            self._request.reset_state()
            if n:
                for layer in range(shape.layers):
                    self._keys[layer].state = _tensor(keys[layer])
                    spoiled = spoil and layer == shape.layers - 1
                    rows = np.repeat(values[layer], 2, axis=1) if spoiled else values[layer]
                    self._values[layer].state = _tensor(rows)
        except (RuntimeError, MemoryError) as err:
            raise StateFailed(_short(str(err))) from err
        if n and self.row_counts() != (n, n):
            raise StateFailed(f"the engine holds {self.row_counts()} rows after a load of {n}")

    def states(self) -> States:
        """Everything the engine holds, read from its state tensors (each read copies the tensor)."""
        return States(tuple(map(_rows, self._keys)), tuple(map(_rows, self._values)))


def _rows(state: Any) -> F32:
    data = state.state.data
    # Before the first call the batch dimension is 0; then there are no rows.
    return (
        np.array(data[0].transpose(1, 0, 2), np.float32, order="C")
        if data.shape[0]
        else np.array(data.reshape(0, data.shape[1], data.shape[3]), np.float32)
    )


def _tensor(rows: F32) -> Any:
    return ov.Tensor(np.ascontiguousarray(rows.transpose(1, 0, 2)[None]))


def _wide(values: Any) -> Any:
    return np.asarray(values, np.int32).reshape(1, 1, 1, -1)


def _mask(visible: Any) -> F32:
    return np.where(visible, np.float32(0), np.float32(-np.inf))[None, None]


def _short(text: str) -> str:
    """The end of OpenVINO's stack of messages, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Exception from")]
    return " ".join(lines)[-300:] or text[-300:]
