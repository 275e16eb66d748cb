"""The points of a what-if on a Ray cluster (extra `ray`). Ray itself runs in a process of its own, `ray_driver`.

A driver whose cluster goes away is ended by Ray, in the middle of whatever it does; so it is not this process.
"""

from __future__ import annotations

import importlib.util
import pickle
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from kvtape.backends.errors import EnvironmentProblem
from kvtape.sim.errors import SimulationError
from kvtape.sim.whatif.child import Child
from kvtape.sim.whatif.executors import Job, Runner, WorkerLost

__all__ = ["RayCluster"]

_MODULE: Final = "kvtape.sim.whatif.ray_driver"
_ADDRESS: Final = re.compile(r"(?:ray://)?(?P<host>[\w.\-]+|\[[0-9A-Fa-f:]+\]):(?P<port>[0-9]{1,5})")
_KNOCK_S: Final = 10.0
_GRACE_S: Final = 10.0
"""What Ray gets to end a cluster that it started."""


class RayCluster:
    """`address`: `local` starts a cluster on this machine, `auto` finds one, `HOST:PORT` or `ray://HOST:PORT` joins it.

    `workers`: tasks at once; None: as many as the cluster has CPUs for. Each node needs this version of kvtape.
    """

    def __init__(self, address: str, workers: int | None = None) -> None:
        """Raises SimulationError for what is no address."""
        if address not in ("auto", "local") and not _ADDRESS.fullmatch(address):
            raise SimulationError(f"--ray {address}: choose local, auto, HOST:PORT or ray://HOST:PORT")
        self.address, self.workers = address, workers

    @contextmanager
    def open(self, job: Job, subject: Any) -> Iterator[Runner]:
        """Raises ModuleNotFoundError without Ray, EnvironmentProblem when the cluster is not reached."""
        if importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError("No module named 'ray'", name="ray")
        self._knock()
        driver = Child(_MODULE)
        try:
            driver.tell((self.address, self.workers, pickle.dumps((job, subject))))
            self._hear(driver)
            yield partial(self._run, driver)
        finally:
            driver.end(grace_s=_GRACE_S)

    def _knock(self) -> None:
        """Ray itself takes minutes to find out that nobody is there. Raises EnvironmentProblem."""
        there = _ADDRESS.fullmatch(self.address)
        if there is None:
            return
        try:
            socket.create_connection((there["host"].strip("[]"), int(there["port"])), _KNOCK_S).close()
        except OSError as err:
            raise EnvironmentProblem(
                f"no Ray cluster at {self.address}: {err.strerror or err}; start one, or give --ray local"
            ) from None

    def _run(self, driver: Child, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Raises WorkerLost for a task that no worker lived through, and what a job raised."""
        driver.tell(list(tasks))
        for _ in tasks:
            yield self._hear(driver)

    def _hear(self, driver: Child) -> Any:
        try:
            well, answer = driver.hear()
        except EOFError:
            raise WorkerLost(
                f"the Ray cluster {self.address} is gone: its driver {driver.how_it_ended()}; "
                "start it again, or run without --ray"
            ) from None
        if not well:
            raise answer
        return answer
