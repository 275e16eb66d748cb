"""Costs from numbers of hardware, where no log exists: the roofline (Williams, Waterman, Patterson 2009).

An operation takes what its arithmetic takes at `flops`, or what its bytes take at `bytes_per_s`, whichever is longer.
A prefill computes 2 * params operations a token, reads the weights once a call and the rows once for each tile of 64
queries; a decode reads the weights and the resident rows for each token. Sums of both stand in for the longer one
where it depends on sizes, so that the estimate is at most twice too slow and never too quick. Nothing of an engine is
in it: these costs are hypothetical.
"""

from __future__ import annotations

import math
from typing import Final

from kvtape.backends.modelled.work import WorkKind
from kvtape.sim.costs.model import CostTable, KindCosts, Origin
from kvtape.sim.costs.terms import TERMS
from kvtape.sim.errors import CostsError

__all__ = ["roofline_costs"]

_TILE: Final = 64
_KNOWN: Final = ("flops", "bytes_per_s", "params", "weight_bytes", "row_bytes")


def roofline_costs(text: str, *, machine: str | None, kvtape_version: str) -> CostTable:
    """Costs from `flops=1e11,bytes_per_s=2e10,params=1.3e8,weight_bytes=1.4e8,row_bytes=23040`.

    Raises CostsError for a number that is missing, unknown or not above 0.
    """
    given = _read(text)
    flop_ns, byte_ns = 1e9 / given["flops"], 1e9 / given["bytes_per_s"]
    token, weights = 2 * given["params"] * flop_ns, given["weight_bytes"] * byte_ns
    row = given["row_bytes"] * byte_ns
    rates: dict[WorkKind, dict[str, float]] = {
        "prefill": {"call": weights, "token": token, "attended_row": row / _TILE},
        "decode": {"token": max(token, weights), "attended_row": row},
        "truncate": {},
        "evict": {"token": 2 * row},
        "shift": {"token": 2 * row},
        "export": {"byte": 2 * byte_ns},
        "admit": {"byte": 2 * byte_ns},
        "snapshot": {"byte": 2 * byte_ns},
        "restore": {"byte": 2 * byte_ns},
    }
    kinds = {
        kind: KindCosts(tuple(rates[kind].get(term.name, 0.0) for term in TERMS[kind]))
        for kind in TERMS
        if kind in rates
    }
    if not all(math.isfinite(rate) for costs in kinds.values() for rate in costs.rates):
        raise CostsError(f"--roofline {text!r}: rates beyond all numbers; look at the sizes")
    origin = Origin(
        backend="roofline",
        machine=machine,
        row_bytes=round(given["row_bytes"]),
        kvtape_version=kvtape_version,
        hypothetical=True,
    )
    return CostTable(origin, kinds)


def _read(text: str) -> dict[str, float]:
    wanted = ",".join(f"{key}=N" for key in _KNOWN)
    found: dict[str, float] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key not in _KNOWN or key in found:
            raise CostsError(f"--roofline {part!r}: write {wanted}, each once")
        try:
            found[key] = float(value)
        except ValueError:
            raise CostsError(f"--roofline {part!r}: {value!r} is no number; write one like 2e12") from None
        if not 0 < found[key] < float("inf"):
            raise CostsError(f"--roofline {part!r}: needs a number above 0")
    if len(found) < len(_KNOWN):
        raise CostsError(f"--roofline lacks {', '.join(k for k in _KNOWN if k not in found)}; write {wanted}")
    return found
