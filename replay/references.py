"""The reference logits of a replay, computed beside the engines: they follow from the log and the model alone."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.model.weights import Weights
from kvtape.replay.checkpoints import Checkpoint, plan_checkpoints
from kvtape.replay.covered import rounding_weights
from kvtape.replay.dense import reference_logits
from kvtape.replay.lineage import LineageBuilder, LineageWay
from kvtape.replay.story import Story

__all__ = ["ROUNDING_STEPS", "References"]

_Key = tuple[int, LineageWay, bool, float | None]
ROUNDING_STEPS: Final = (1.0, 1.02, 1.04, 1.06)
"""Each rounds elsewhere: what one rounding does to the logits of a text that repeats itself is a matter of chance."""


@dataclass(frozen=True, slots=True)
class _Reference:
    """Rows of `logits` float32 `[n, n_vocab]` by checkpoint."""

    row: dict[Checkpoint, int]
    logits: npt.NDArray[np.float32]


class References:
    """One worker thread that computes, story by story, the reference of each way; close it to stop early."""

    def __init__(self, weights: Weights, stories: Sequence[Story], ways: Iterable[LineageWay]) -> None:
        self._weights, self._stories = weights, stories
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvtape-reference")
        self._futures: dict[_Key, Future[_Reference | None]] = {}
        for i in (i for i, story in enumerate(stories) if not story.surrogate):
            for way in sorted(set(ways)):
                self._future((i, way, True, None))

    def logits(
        self, story: int, way: LineageWay, remove_tail: bool, places: Sequence[Checkpoint]
    ) -> npt.NDArray[np.float32]:
        """Reference logits `[len(places), n_vocab]`; waits for them."""
        found = self._at((story, way, remove_tail, None), places)
        assert found is not None
        return found

    def rounded(
        self, story: int, way: LineageWay, remove_tail: bool, places: Sequence[Checkpoint]
    ) -> list[npt.NDArray[np.float32]]:
        """The same of the reference with rows rounded as engines do, for each of `ROUNDING_STEPS`.

        Empty where no weight is packed, so that nothing is rounded.
        """
        each = [self._at((story, way, remove_tail, step), places) for step in ROUNDING_STEPS]
        return [logits for logits in each if logits is not None]

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at(self, key: _Key, places: Sequence[Checkpoint]) -> npt.NDArray[np.float32] | None:
        reference = self._future(key).result()
        return None if reference is None else reference.logits[[reference.row[place] for place in places]]

    def _future(self, key: _Key) -> Future[_Reference | None]:
        if key not in self._futures:
            self._futures[key] = self._pool.submit(self._compute, *key)
        return self._futures[key]

    def _compute(self, at: int, way: LineageWay, remove_tail: bool, step: float | None) -> _Reference | None:
        story, weights = self._stories[at], self._weights if step is None else rounding_weights(self._weights, step)
        if weights is None:
            return None
        builder = LineageBuilder(way, remove_tail=remove_tail)
        wanted = plan_checkpoints(story.events)
        slots: dict[Checkpoint, int] = {}
        for event, after in zip(story.events, story.states, strict=True):
            first = builder.step(event, after, story.tokens.get(event.seq))
            if first is not None:
                slots.update({(seq, k): first + k - 1 for seq, k in wanted if seq == event.seq})
        places = sorted(slots, key=lambda place: slots[place])
        wanted_slots = np.array([slots[place] for place in places], np.int64)
        logits = reference_logits(weights, builder.lineage(), wanted_slots, self._stop.is_set)
        return _Reference({place: i for i, place in enumerate(places)}, logits)
