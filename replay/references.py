"""The reference logits of a replay, computed beside the engines: they follow from the log and the model alone."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from kvtape.backends.reference.model.weights import Weights
from kvtape.replay.checkpoints import Checkpoint, plan_checkpoints
from kvtape.replay.dense import reference_logits
from kvtape.replay.lineage import LineageBuilder, LineageWay
from kvtape.replay.story import Story

__all__ = ["References"]

_Key = tuple[int, LineageWay, bool]


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
        self._futures: dict[_Key, Future[_Reference]] = {}
        for i in (i for i, story in enumerate(stories) if not story.surrogate):
            for way in sorted(set(ways)):
                self._future(i, way, True)

    def logits(
        self, story: int, way: LineageWay, remove_tail: bool, places: Sequence[Checkpoint]
    ) -> npt.NDArray[np.float32]:
        """Reference logits `[len(places), n_vocab]`; waits for them."""
        reference = self._future(story, way, remove_tail).result()
        return reference.logits[[reference.row[place] for place in places]]

    def close(self) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _future(self, story: int, way: LineageWay, remove_tail: bool) -> Future[_Reference]:
        key = (story, way, remove_tail)
        if key not in self._futures:
            self._futures[key] = self._pool.submit(self._compute, self._stories[story], way, remove_tail)
        return self._futures[key]

    def _compute(self, story: Story, way: LineageWay, remove_tail: bool) -> _Reference:
        builder = LineageBuilder(way, remove_tail=remove_tail)
        wanted = plan_checkpoints(story.events)
        slots: dict[Checkpoint, int] = {}
        for event, after in zip(story.events, story.states, strict=True):
            first = builder.step(event, after, story.tokens.get(event.seq))
            if first is not None:
                slots.update({(seq, k): first + k - 1 for seq, k in wanted if seq == event.seq})
        places = sorted(slots, key=lambda place: slots[place])
        at = np.array([slots[place] for place in places], np.int64)
        logits = reference_logits(self._weights, builder.lineage(), at, self._stop.is_set)
        return _Reference({place: i for i, place in enumerate(places)}, logits)
