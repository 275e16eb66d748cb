"""A Ray driver: `python -m kvtape.sim.whatif.ray_driver FD`, started by `ray_cluster`.

Tasks go to the cluster as they are; the job and its subject once, as one object. A task whose worker or node is lost is
given to another, twice; Ray's own retries are off, because those after running out of memory have no end.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.metadata import version
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, Final, NoReturn

from kvtape.backends.errors import EnvironmentProblem
from kvtape.sim.whatif.child import end_with_parent, link_to_parent
from kvtape.sim.whatif.executors import WorkerLost, attempt

__all__ = ["Cluster", "main", "run_remote"]

_ATTEMPTS: Final = 3
_IN_FLIGHT: Final = 256
"""Tasks that the cluster has at once, where nobody says how many: more than it has CPUs, few enough to look through."""
_SHORT: Final = 24
"""Sockets of a cluster of one's own are files, and their paths have to be short. Elsewhere Ray has a place of its own,
in which logs and sockets of every cluster stay for ever.
"""
_LOOK_S: Final = 5.0
"""How often a silent cluster is looked at."""
_PATIENCE_S: Final = 60.0
"""How long a cluster may be without any CPU, as one is that grows when there is work."""
_STORE_BYTES: Final = 128 << 20
"""Shared memory of a cluster of one's own, beside the subject: results are small."""

_loaded: tuple[str, Any, Any] | None = None
"""The job and the subject that this process of the cluster read last, by their digest."""


def run_remote(kvtape_version: str, path: list[str], digest: str, work: bytes, task: Any) -> tuple[bool, Any]:
    """On a node of the cluster: as `executors.attempt`. Refuses where another version of kvtape would answer."""
    global _loaded
    if version("kvtape") != kvtape_version:
        why = f"a node of the Ray cluster has kvtape {version('kvtape')}, this is {kvtape_version}; install the same"
        return False, EnvironmentProblem(why)
    if _loaded is None or _loaded[0] != digest:
        sys.path.extend(entry for entry in path if entry not in sys.path)
        _loaded = (digest, *pickle.loads(work))
    return attempt(_loaded[1], _loaded[2], task)


class Cluster:
    """A connection to Ray, and the work that is there."""

    def __init__(self, address: str, workers: int | None, work: bytes) -> None:
        """Raises EnvironmentProblem when the cluster is not reached, ModuleNotFoundError without Ray."""
        if address == "local":
            # Its secret is of this cluster alone; else Ray makes one that stays in the home.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray

        self._ray, self._address = ray, address
        self._most = workers or _IN_FLIGHT
        given: dict[str, Any] = {}
        self._folder: TemporaryDirectory[str] | None = None
        if address == "local":
            given = {"include_dashboard": False, "object_store_memory": _STORE_BYTES + 2 * len(work)}
            if len(gettempdir()) <= _SHORT:
                self._folder = TemporaryDirectory(prefix="kvtape-ray-", ignore_cleanup_errors=True)
                given |= {"_temp_dir": self._folder.name}
            given |= {} if workers is None else {"num_cpus": workers}
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **given)
        except Exception as err:
            why = " ".join(str(err).split())[:300] or type(err).__name__
            raise EnvironmentProblem(
                f"no Ray cluster at {address}: {why}; start one with ray start --head, or leave --ray"
            ) from None
        self._fixed = (version("kvtape"), sys.path, hashlib.sha256(work).hexdigest(), ray.put(work))
        self._flying: dict[Any, int] = {}
        self._remote = ray.remote(num_cpus=1, max_retries=0)(run_remote)

    def run(self, tasks: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """(index, result) as they come. Raises what a job raised, and WorkerLost naming the task that could not be."""
        waiting, tried = deque(range(len(tasks))), [0] * len(tasks)
        flying = self._flying
        quiet_since = None
        while waiting or flying:
            while waiting and len(flying) < self._most:
                index = waiting.popleft()
                flying[self._remote.remote(*self._fixed, tasks[index])] = index
            done, _ = self._ray.wait(list(flying), timeout=_LOOK_S)
            quiet_since = None if done else self._look(quiet_since, tasks[min(flying.values())])
            for ref in done:
                index = flying.pop(ref)
                try:
                    well, answer = self._ray.get(ref)
                except self._ray.exceptions.RayError as err:
                    tried[index] += 1
                    self._again(err, tasks[index], tried[index])
                    waiting.appendleft(index)
                    continue
                if not well:
                    raise answer
                yield index, answer

    def leave(self) -> None:
        """End what still runs there, and a cluster of our own, which else leaves parts of itself for a minute."""
        for ref in self._flying:
            with suppress(self._ray.exceptions.RayError):
                self._ray.cancel(ref, force=True)
        self._ray.shutdown()
        if self._folder is not None:
            self._folder.cleanup()

    def _again(self, err: Exception, task: Any, tried: int) -> None:
        """Return if the task may be tried again. Raises EnvironmentProblem, WorkerLost."""
        kind = type(err).__name__
        if isinstance(err, self._ray.exceptions.RayTaskError):
            cause = " ".join(str(getattr(err, "cause", err)).split())[:300]
            raise EnvironmentProblem(f"a node of the Ray cluster cannot run kvtape {self._fixed[0]}: {cause}")
        if tried >= _ATTEMPTS:
            raise WorkerLost(
                f"{tried} workers of the Ray cluster died while they simulated {task} ({kind}); "
                "if memory ran out, give the nodes more, or fewer --workers"
            )

    def _look(self, quiet_since: float | None, task: Any) -> float | None:
        """Since when the cluster has no CPU at all; None where it has. Raises WorkerLost when that is too long."""
        resources: dict[str, float] = self._ray.cluster_resources()  # type: ignore[no-untyped-call]
        if resources.get("CPU", 0) >= 1:
            return None
        now = time.monotonic()
        if quiet_since is not None and now - quiet_since > _PATIENCE_S:
            raise WorkerLost(f"the Ray cluster {self._address} has no CPU left for {task}; run without --ray")
        return quiet_since or now


def main(arguments: list[str]) -> None:
    """Connect, then run lists of tasks until nobody sends any more, or SIGTERM says so."""
    signal.signal(signal.SIGTERM, _leave)
    end_with_parent(signal.SIGTERM)
    link = link_to_parent(arguments)
    # Nothing is told to anybody about how a cluster of one's own is used.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    cluster = None
    try:
        cluster = Cluster(*link.recv())
        signal.signal(signal.SIGTERM, _leave)  # Ray has put its own there
        link.send((True, None))
        while True:
            for answer in cluster.run(link.recv()):
                link.send((True, answer))
    except (EOFError, ConnectionError):
        pass  # the parent has what it wanted, or is gone
    except Exception as err:
        with suppress(ConnectionError):
            link.send((False, err))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # from here on not to be disturbed
        if cluster is not None:
            cluster.leave()
        elif "ray" in sys.modules:
            sys.modules["ray"].shutdown()  # one that had begun to start


def _leave(signum: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise SystemExit


if __name__ == "__main__":
    main(sys.argv[1:])
