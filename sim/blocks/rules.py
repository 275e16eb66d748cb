"""The rules of a hit rate. Three honest tools give three numbers for one policy and one budget; these say why.

Every rule is a field, every field is in the report, and a preset is nothing but values of the fields.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, get_args

from kvtape.planner.grammar import choose_name
from kvtape.sim.blocks.errors import CurveError

__all__ = ["PRESETS", "Rules", "rules_named"]

Weighting = Literal["token", "block"]
Prefix = Literal["longest", "any"]
InFlight = Literal["held", "none"]
Identity = Literal["path", "id"]
Order = Literal["root_last", "root_first"]
Overlong = Literal["full", "minus_one"]
Underfilled = Literal["keep", "omit"]

_FIRST_ADMISSIONS = "each request counts once, at its first admission"


@dataclass(frozen=True, slots=True)
class Rules:
    """`weighting`: a hit counts the block's tokens, or 1. `prefix`: only hits before a request's first miss count
    (`longest`), or every hit. `warmup`: share of the requests, from the first on, that fill the cache unmeasured.

    `in_flight`: `held` looks a whole request up before any block of it is admitted; lru and opt then evict a block
    only after all blocks that stand behind it, and none of the request's own for another of them. `none`: each
    block is an access of its own. `bypass`: opt may leave out what it looks up; without, each block looked up is
    admitted. `identity`: a block is the same behind the same blocks only (`path`), or wherever its id is (`id`).
    `order`: in which a request's blocks are admitted, the first block first or last. `overlong`: a request of more
    blocks than the budget leaves the budget's number of its first blocks, or one fewer. `underfilled`: budgets that
    the warm-up does not fill.
    """

    name: str = "kvtape"
    weighting: Weighting = "token"
    prefix: Prefix = "longest"
    warmup: float = 0.5
    in_flight: InFlight = "held"
    bypass: bool = True
    identity: Identity = "path"
    order: Order = "root_last"
    overlong: Overlong = "full"
    underfilled: Underfilled = "keep"

    def __post_init__(self) -> None:
        if not 0 <= self.warmup < 1:
            raise CurveError(f"warm-up {self.warmup}: give the share of requests that is not measured, 0 to below 1")
        if self.in_flight == "held" and self.identity != "path":
            raise CurveError("requests in flight are held as paths: identity id goes with in-flight none only")

    def varied(self, **given: Any) -> Rules:
        """These rules with the fields that are given and not None; the name then says that it is a variant.

        Raises CurveError, SpecError for a value that is not one of its field's.
        """
        changed = {key: value for key, value in given.items() if value is not None and value != getattr(self, key)}
        for key, value in changed.items():
            if key in _CHOICES:
                choose_name(f"{key.replace('_', '-')} rule", value, _CHOICES[key])
        if not changed:
            return self
        return replace(self, name=f"{self.name} varied", **changed)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "admissions": _FIRST_ADMISSIONS}


_CHOICES: Final = {
    "weighting": get_args(Weighting),
    "prefix": get_args(Prefix),
    "in_flight": get_args(InFlight),
    "identity": get_args(Identity),
    "order": get_args(Order),
    "overlong": get_args(Overlong),
    "underfilled": get_args(Underfilled),
}

PRESETS: Final = {
    "kvtape": Rules(),
    "kvcache-simulator": Rules(name="kvcache-simulator", order="root_first", overlong="minus_one", underfilled="omit"),
    "libcachesim": Rules(
        name="libcachesim",
        weighting="block",
        prefix="any",
        warmup=0.0,
        in_flight="none",
        bypass=False,
        identity="id",
        order="root_first",
    ),
}


def rules_named(name: str) -> Rules:
    """Raises SpecError, listing the presets."""
    return PRESETS[choose_name("rules", name, PRESETS)]
