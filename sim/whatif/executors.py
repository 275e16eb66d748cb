"""Where the simulations of a what-if run: the protocol of executors, and the one that needs no other process."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from kvtape.backends.errors import EnvironmentProblem

__all__ = ["Executor", "Job", "Runner", "Serial", "WorkerLost", "attempt"]

Job = Callable[[Any, Any], Any]
"""`job(subject, task)`, a module's function: pure, so that where and how often it runs cannot be told from results."""

Runner = Callable[[Sequence[Any]], Iterator[tuple[int, Any]]]
"""From tasks to (index of the task, what came of it), in the order in which they are done."""


class WorkerLost(EnvironmentProblem):
    """A process that worked on a task is gone. Names the task."""


class Executor(Protocol):
    """What a job raises comes out of the runner; so does WorkerLost. Whoever leaves the block ends all processes."""

    def open(self, job: Job, subject: Any) -> AbstractContextManager[Runner]:
        """Make ready to run `job` on `subject`, which is sent once to each process."""


class Serial:
    """Everything in this process, one task after the other."""

    @contextmanager
    def open(self, job: Job, subject: Any) -> Iterator[Runner]:
        yield lambda tasks: ((i, job(subject, task)) for i, task in enumerate(tasks))


def attempt(job: Job, subject: Any, task: Any) -> tuple[bool, Any]:
    """Whether the job came to an end, and its result; otherwise what it raised, in a form that can be sent."""
    try:
        return True, job(subject, task)
    except Exception as err:
        return False, _portable(err)


def _portable(err: Exception) -> Exception:
    """`err`, if it can be pickled and built again; its name and text otherwise."""
    try:
        pickle.loads(pickle.dumps(err))
    except Exception:
        return RuntimeError(f"{type(err).__name__}: {err}")
    return err
