"""Every policy's options: their kind, default and what is allowed. Key order is that of the canonical text."""

from __future__ import annotations

from kvtape.planner.blocks import DEFAULT_BLOCK
from kvtape.planner.grammar import REQUIRED, Option
from kvtape.planner.layer_choice import ALL, LATE

__all__ = ["OPTIONS", "POLICY_NAMES"]

_HOLE = ("forget", "refill")

_COMMON: dict[str, Option] = {
    "positions": Option(str, "auto", ("auto", "gap", "rebased")),
    "every": Option(int, 1, (1, None)),
    "hole": Option(str, "refill", _HOLE),
    "block": Option(int, DEFAULT_BLOCK, (1, None)),
}

# Under a lossy policy a chat turn must not prefill its own history again.
_LOSSY = _COMMON | {"hole": Option(str, "forget", _HOLE)}

_BUDGET: dict[str, Option] = {
    "budget": Option(int, REQUIRED, (1, None)),
    "sink": Option(int, 0, (0, None)),
    "recent": Option(int, 1, (1, None)),
}

_RANKED: dict[str, Option] = {"grace": Option(int, 0, (0, None)), **_LOSSY, "split": Option(bool, False)}

_LAYERS: dict[str, Option] = {"layers": Option(str, ALL), "heads": Option(str, "sum", ("sum", "max"))}
# Summed over all layers, those that look at sinks and neighbours drown the few that look for what is asked.
_LATE: dict[str, Option] = _LAYERS | {"layers": Option(str, LATE)}
_NORM: dict[str, Option] = {"norm": Option(str, "sum", ("sum", "mean"))}
# The paper observes 16 to 64 queries; pooling 1 is none.
_WINDOW: dict[str, Option] = {"window": Option(int, 32, (1, None)), "pool": Option(int, 1, (1, None))}

OPTIONS: dict[str, dict[str, Option]] = {
    "none": _COMMON,
    "stream": {
        "sink": Option(int, REQUIRED, (0, None)),
        "recent": Option(int, REQUIRED, (1, None)),
        **_LOSSY,
        "split": Option(bool, True),
    },
    "class": {**_BUDGET, **_COMMON, "split": Option(bool, False)},
    "h2o": {**_BUDGET, "recent": Option(int, REQUIRED, (1, None)), **_NORM, **_LAYERS, **_RANKED},
    "snapkv": {**_BUDGET, **_WINDOW, "queries": Option(str, "window", ("window", "probe")), **_LATE, **_RANKED},
    "tova": {**_BUDGET, **_LATE, **_RANKED},
    "opt": {**_BUDGET, **_LAYERS, **_RANKED},
    "random": {**_BUDGET, "seed": Option(int, REQUIRED, (0, None)), **_RANKED},
    "user": {
        **_BUDGET,
        "scores": Option(str, "none", ("none", "accumulated", "window", "probe")),
        **_NORM,
        **_WINDOW,
        **_LAYERS,
        **_LOSSY,
    },
}
"""`user` holds the options of a policy function; its spec begins with `module:function` and not with a name."""

POLICY_NAMES = tuple(sorted(OPTIONS.keys() - {"user"}))
