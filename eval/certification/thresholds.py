"""The one table of thresholds: how much a storage type may cost before it is not advertised, and where that is from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from kvtape.backends.proofs.rows import Ability, Measure

__all__ = ["THRESHOLDS", "Threshold", "judged", "judged_today"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """`most`, `least` or `equal` a limit, in `unit`; `source`: why this one."""

    ability: Ability
    name: str
    unit: str
    bound: Literal["most", "least", "equal"]
    limit: float
    source: str


_SAME_BITS: Final = (
    "a range that comes back as it was leaves every later number as it was; with flash attention, or rows in another "
    "order, sums are taken in another order: then within the floor of two correct runs of one quantised model (0.003)"
)

THRESHOLDS: Final[tuple[Threshold, ...]] = (
    Threshold("quality", "nll_delta", "nats/token", "most", 0.05, "perplexity at most 5 % above the best precision's"),
    Threshold(
        "quality", "kl", "nats/token", "most", 0.05, "17 times the floor of two correct runs of one quantised model"
    ),
    Threshold("quality", "top1", "share", "least", 0.9, "the gate that replays are held to: first choices agree"),
    Threshold("quality", "recall_delta", "share", "least", -0.125, "one fact of eight may be lost"),
    Threshold("capacity", "row_bytes_delta", "bytes/token", "equal", 0, "what is predicted is what the engine stores"),
    Threshold("round_trip", "changed_bytes", "bytes", "equal", 0, "exported, evicted, admitted: the same bytes"),
    Threshold("round_trip", "kl", "nats", "most", 0.003, _SAME_BITS),
    Threshold("snapshot", "kl", "nats", "most", 0.003, _SAME_BITS),
    Threshold("shift", "nll_delta", "nats/token", "most", 0.05, "as quality, after every key was rotated many times"),
    Threshold("shift", "kl", "nats/token", "most", 0.05, "as quality: 8-bit keys stay at 0.004, 4-bit ones reach 1"),
    Threshold("shift", "top1", "share", "least", 0.9, "as quality"),
)

_BY_NAME: Final = {(t.ability, t.name): t for t in THRESHOLDS}


def judged(ability: Ability, name: str, value: float) -> Measure:
    """`value` held against the table. Raises KeyError for a name that is not there."""
    found = _BY_NAME.get((ability, name))
    if found is None:
        raise KeyError(f"no threshold for {ability} {name}")
    return Measure.judged(ability, name, value, found.unit, **{found.bound: found.limit})


def judged_today(measure: Measure) -> Measure:
    """The same number under the table of today; one that is not in the table, or was not taken, as it is."""
    if measure.value is None or (measure.ability, measure.name) not in _BY_NAME:
        return measure
    anew = judged(measure.ability, measure.name, measure.value)
    return anew.model_copy(update={"reason": measure.reason, "low": measure.low, "high": measure.high})
