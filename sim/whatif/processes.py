"""The local pool: processes that take tasks as they get free. One that dies is named with what it worked on."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from typing import Any, Final

from kvtape.sim.whatif.child import Child
from kvtape.sim.whatif.executors import Job, Runner, WorkerLost

__all__ = ["Processes"]

_MODULE: Final = "kvtape.sim.whatif.worker"


class Processes:
    """At most `workers` processes, started when there is work for them."""

    def __init__(self, workers: int) -> None:
        self.workers = workers

    @contextmanager
    def open(self, job: Job, subject: Any) -> Iterator[Runner]:
        crew = _Crew(self.workers, pickle.dumps((job, subject)))
        try:
            yield crew.run
        finally:
            crew.end()


class _Crew:
    def __init__(self, size: int, work: bytes) -> None:
        self._size, self._work = size, work
        self._children: list[Child] = []

    def run(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Raises WorkerLost for a process that died, and what a job raised; the other processes then still work."""
        self._start(len(tasks))
        waiting, busy = deque(range(len(tasks))), dict[Any, tuple[Child, int]]()
        idle = list(self._children)
        while waiting or busy:
            while waiting and idle:
                child, index = idle.pop(), waiting.popleft()
                child.tell(tasks[index])
                busy[child.link] = child, index
            for link in wait(list(busy)):
                child, index = busy.pop(link)
                yield index, self._result(child, tasks[index])
                idle.append(child)

    def end(self) -> None:
        for child in self._children:
            child.end()

    def _start(self, n_tasks: int) -> None:
        fresh = []
        while len(self._children) < min(self._size, n_tasks):
            fresh.append(Child(_MODULE))
            self._children.append(fresh[-1])
        for child in fresh:  # all of them start while the first reads
            with suppress(BrokenPipeError, ConnectionResetError):
                child.link.send_bytes(self._work)

    def _result(self, child: Child, task: Any) -> Any:
        try:
            well, answer = child.hear()
        except EOFError:
            raise WorkerLost(
                f"a worker {child.how_it_ended()} while it simulated {task}; if memory ran out, give fewer --workers"
            ) from None
        if not well:
            raise answer
        return answer
