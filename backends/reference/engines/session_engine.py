"""The base of engines that carry a session: checks, the bound weights, and steps that are whole or undone."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvtape.backends.reference.engines.engine import EngineInfo, Memory, StateHandle, StateMask
from kvtape.backends.reference.engines.state_dump import Dumping, StepState, joined
from kvtape.backends.reference.errors import EmptyPrompt, ExecutionRefused, StateInvalidated
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import LayerRows, advance
from kvtape.backends.reference.model.ffn import FfnRouter
from kvtape.backends.reference.model.steps import embed
from kvtape.backends.reference.model.tokens import Ids, checked_tokens
from kvtape.backends.reference.model.weights import Weights

__all__ = ["EngineSnapshot", "SessionEngine"]

_IN_THE_MIDDLE = "a step was left in the middle, and so was taking it back"
_NOT_OF_THE_SESSION = frozenset({"info", "mask", "last_state", "_dumps"})


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """A session of the engine `spec`, apart from it: nothing that the engine does later changes it."""

    spec: str
    n_tokens: int
    state: Mapping[str, Any]


class SessionEngine(ABC):
    """An engine says how it begins, steps, commits and takes a step back; what every engine owes its caller is here.

    `mask` says how much of each call is kept as `last_state`.
    """

    def __init__(self, info: EngineInfo, mask: StateMask = StateMask.NONE) -> None:
        self.info = info
        self.mask = mask
        self.last_state: StepState | None = None
        self._weights: Weights | None = None
        self._n_tokens = 0
        self._lost: str | None = None
        self._counts: dict[str, int] = {}
        self._dumps: list[StepState] = []

    def prefill(self, weights: Weights, ffn: FfnRouter, tokens: Sequence[int]) -> Floats:
        ids = checked_tokens(tokens, weights.n_vocab)
        why = self._obstacle(weights)
        if why:
            raise ExecutionRefused("unsupported", f"{self.info.name}: {why}")
        with self._new_session():
            hidden = self._begin(weights, ffn, ids)
            self._bind(weights, len(ids))
            return hidden

    def decode_step(self, weights: Weights, ffn: FfnRouter, token: int) -> Floats:
        if self._weights is None:
            raise EmptyPrompt("decode_step before any prefill; prefill a prompt first")
        self._bound(weights)
        ids = checked_tokens([token], weights.n_vocab)
        self._lost = _IN_THE_MIDDLE
        before = self._attributes()
        try:
            self._dumps = []
            hidden = self._step(weights, ffn, ids)
            state = joined(self._dumps)
            self._n_tokens, self.last_state, self._lost = self._n_tokens + 1, state, None
            return hidden
        except BaseException as err:
            self._take_back(before, err)
            raise

    def snapshot(self) -> EngineSnapshot:
        """A copy of the session. Raises EmptyPrompt before any prefill, StateInvalidated where the state is lost."""
        if self._lost:
            raise StateInvalidated(self._lost)
        if self._weights is None:
            raise EmptyPrompt("no session to copy before any prefill; prefill a prompt first")
        state = {name: value for name, value in vars(self).items() if name not in _NOT_OF_THE_SESSION}
        return EngineSnapshot(self.info.spec, self._n_tokens, _copied(state, self._weights))

    def restore(self, snapshot: EngineSnapshot) -> None:
        """Go on from a copy, as often as wanted. Raises ExecutionRefused for one of another spec."""
        if snapshot.spec != self.info.spec:
            raise ExecutionRefused("binding_defect", f"{self.info.spec} cannot go on from a copy of {snapshot.spec}")
        vars(self).update(_copied(snapshot.state, snapshot.state["_weights"]))
        self.last_state = None

    def stage_summary(self) -> Mapping[str, int]:
        return dict(self._counts)

    def handle(self) -> StateHandle:
        return StateHandle(self.info.spec, self._n_tokens)

    @property
    def window_tokens(self) -> int | None:
        return None

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def read_kv_row(self, layer: int, position: int) -> tuple[Floats, Floats] | None: ...

    @abstractmethod
    def _begin(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        """Compute the prompt into a new state, and take that for the engine's own as the very last thing."""

    @abstractmethod
    def _step(self, weights: Weights, ffn: FfnRouter, ids: Ids) -> Floats:
        """Compute one token behind the `_n_tokens` there are."""

    @abstractmethod
    def _rewind(self) -> None:
        """Bring the state back to `_n_tokens`, whichever layer the failed step had reached. Raises where it cannot."""

    def _obstacle(self, weights: Weights) -> str | None:
        """Why this engine cannot carry this model; None where it can."""
        return None

    def _advance(self, weights: Weights, ffn: FfnRouter, ids: Ids, start: int, rows: LayerRows) -> Floats:
        """All rows `[n, n_embd]` of `ids` at positions `start ..`, through the dispatch; dumped as `mask` says."""
        positions = np.arange(start, start + len(ids), dtype=np.int64)
        dump = Dumping(rows, self.mask)
        hidden = advance(weights, ffn, embed(weights, ids), positions, dump)
        self._count("rows_computed", len(ids))
        state = dump.state(positions)
        if state is not None:
            self._dumps.append(state)
        return hidden

    @contextmanager
    def _new_session(self) -> Iterator[None]:
        """Counters and dump begin anew; an exception within leaves the session that there was."""
        before = self._attributes()
        try:
            self._counts, self._dumps = {}, []
            yield
            self.last_state = joined(self._dumps)
        except BaseException:
            vars(self).update(before)
            raise

    def _attributes(self) -> dict[str, Any]:
        """What the session is made of, to be put back: the objects themselves, and a copy of the counters."""
        return {**vars(self), "_counts": dict(self._counts)}

    def _bind(self, weights: Weights, n_tokens: int) -> None:
        self._weights, self._n_tokens, self._lost = weights, n_tokens, None

    def _bound(self, weights: Weights) -> None:
        """Raises StateInvalidated where the state is lost, ExecutionRefused for weights other than the prefill's."""
        if self._lost:
            raise StateInvalidated(self._lost)
        if weights is not self._weights:
            raise ExecutionRefused("binding_defect", f"{self.info.name} was prefilled with other weights")

    def _count(self, what: str, n: int = 1) -> None:
        self._counts[what] = self._counts.get(what, 0) + n

    def _take_back(self, before: Mapping[str, Any], err: BaseException) -> None:
        """The state counts as lost until it is whole again: this may be interrupted too."""
        vars(self).update(before)
        try:
            self._rewind()
        except Exception as failed:
            self._lost = f"{type(err).__name__} in a step that could not be taken back ({failed})"
            raise StateInvalidated(self._lost) from err
        self._lost = None

    def _check_layer(self, layer: int) -> None:
        if self._lost:
            raise StateInvalidated(self._lost)
        if self._weights is None:
            raise EmptyPrompt("no row to read before any prefill; prefill a prompt first")
        if not 0 <= layer < self._weights.architecture.n_layer:
            raise IndexError(f"layer {layer} of a model with {self._weights.architecture.n_layer}")


def _copied(state: Mapping[str, Any], weights: Weights) -> dict[str, Any]:
    """Everything anew but the weights, which no session changes."""
    return {name: copy.deepcopy(value, {id(weights): weights}) for name, value in state.items()}
