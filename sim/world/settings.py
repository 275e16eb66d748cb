"""What is varied in a simulation, and the names of its rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvtape.planner.grammar import INT_MAX
from kvtape.sim.errors import SimulationError
from kvtape.sim.modelled_time import at_pace
from kvtape.sim.world.failures import SlotFailure

__all__ = ["Arrivals", "Settings"]

Arrivals = Literal["open", "closed"]


@dataclass(frozen=True, slots=True)
class Settings:
    """One machine and one way to drive it. None: as recorded.

    `policy` spec text. `n_ctx`, `cold_tokens` in tokens; `block` tokens of a planner block. `slots`:
    contexts that can be in use at once, None for one each. `memory_bytes`: KV that all contexts may take together.
    `link_bytes_per_s`, `link_latency_ns`: the link to the cold store, which all slots share; None: as calibrated,
    and not shared. `arrivals`: `open` keeps the recorded times, `closed` the recorded thinking between turns;
    `pace` divides both. `affinity`: a conversation finds its cache again while nobody needed the slot.
    `slot_failures`: slots that fail for good; a context of their own machine without `slots` is one too.
    """

    policy: str | None = None
    n_ctx: int | None = None
    block: int | None = None
    cold_tokens: int | None = None
    slots: int | None = None
    memory_bytes: int | None = None
    link_bytes_per_s: int | None = None
    link_latency_ns: int = 0
    arrivals: Arrivals = "open"
    pace: float = 1.0
    affinity: bool = True
    slot_failures: tuple[SlotFailure, ...] = ()

    def __post_init__(self) -> None:
        for name in ("n_ctx", "block", "cold_tokens", "slots"):
            given = getattr(self, name)
            if given is not None and given > INT_MAX:
                raise SimulationError(f"{name}={given}: give at most {INT_MAX}")
        if self.slots is not None and self.slots < 1:
            raise SimulationError(f"slots={self.slots}: with no slot alive nothing is served; give at least 1")
        if self.link_bytes_per_s is not None and self.link_bytes_per_s < 1:
            raise SimulationError(
                f"a cold-store link of {self.link_bytes_per_s} bytes/s moves nothing; give it bandwidth"
            )
        if self.link_latency_ns < 0:
            raise SimulationError(f"a link latency of {self.link_latency_ns} ns; it cannot be negative")
        if self.link_latency_ns and self.link_bytes_per_s is None:
            raise SimulationError("a link latency without a link; give its bandwidth too")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise SimulationError(f"a KV memory of {self.memory_bytes} bytes holds no context")
        at_pace(self.pace)
        if self.arrivals not in ("open", "closed"):
            raise SimulationError(f"arrivals {self.arrivals!r}: choose open or closed")

    def paced(self, ns: int) -> int:
        """Recorded ns at this pace. Raises SimulationError for what no log can bear."""
        return at_pace(self.pace)(ns)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def rules(self) -> dict[str, str]:
        """What the numbers of a report rest on, in words."""
        timing = "open loop: recorded arrival times" if self.arrivals == "open" else "closed loop: recorded think times"
        link = (
            "as calibrated, each slot by itself" if self.link_bytes_per_s is None else "shared, one transfer at a time"
        )
        return {
            "workload": "teacher-forced from the log; a policy changes costs and residency, never what is said",
            "arrivals": timing + ("" if self.pace == 1 else f", {self.pace:g} times as fast"),
            "queue": "first come, first served; a conversation's turns wait for each other",
            "slots": "one each" if self.slots is None else f"{self.slots}, each computing at the calibrated speed",
            "affinity": (
                "a conversation keeps its slot until another needs it, the longest idle first"
                if self.affinity
                else "none: every turn begins with an empty cache"
            ),
            "cold_link": link,
            "slot_failures": _failures(self.slot_failures),
            "ttft": "from arrival to the logits of the prompt's last token",
            "retained_mass": "dense attention on rows resident then, at least; all layers and queries alike",
        }


def _failures(failures: Sequence[SlotFailure]) -> str:
    if not failures:
        return "none"
    times = ", ".join(f"{f.at_ns / 1e9:g} s" + ("" if f.slot is None else f" (slot {f.slot})") for f in failures)
    return f"at {times}; the cache is lost, a turn that runs begins again on another slot, its caller waits"
