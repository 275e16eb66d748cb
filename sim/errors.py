"""What the simulator raises. Each message is one line that names the file or the number, and the remedy."""

from __future__ import annotations

from kvtape.backends.errors import KvtapeError, UsageError

__all__ = ["CostsError", "NoAttention", "SimulationError", "Stalled", "WorkloadError"]


class SimulationError(UsageError):
    """Bad input of a simulation."""


class CostsError(SimulationError):
    """A cost model that is damaged, of another model, or says nothing of what is asked."""


class NoAttention(SimulationError):
    """A log without the attention that is asked for, or with a gap in it."""


class WorkloadError(SimulationError):
    """A log that cannot be run again: nothing in it, or times that are none."""


class Stalled(KvtapeError):
    """The watchdog: simulated time stood still for too many steps."""

    exit_code = 1
