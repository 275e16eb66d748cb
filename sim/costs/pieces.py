"""The price of computing many tokens call by call, without going through the calls."""

from __future__ import annotations

from collections.abc import Callable

from kvtape.backends.modelled.work import WorkKind
from kvtape.sim.costs.model import CostTable, whole_ns
from kvtape.sim.costs.terms import SMALL_BATCH

__all__ = ["in_pieces"]


def in_pieces(costs: CostTable, kind: WorkKind, piece: int | None) -> Callable[[int, int], int]:
    """(tokens, resident rows) -> ns of computing `tokens` behind them, `piece` a call (None: all in one).

    What `costs.cost_ns` says of every call, added up, but rounded once: calls, tokens and attended rows add up, and of
    all calls but the last the tokens of small batches are the same. Raises CostsError where there is no price, and the
    function for one beyond all floats.
    """
    rates = costs.rates(kind)
    call, token, attended = rates["call"], rates["token"], rates["attended_row"]
    small = rates.get("small_batch_token", 0.0)

    def price(tokens: int, resident: int) -> int:
        full, rest = divmod(tokens, piece) if piece else (0, tokens)
        calls = full + (rest > 0)
        few = min(rest, SMALL_BATCH) + (full * min(piece, SMALL_BATCH) if piece else 0)
        rows = tokens * resident + tokens * (tokens + 1) / 2
        return whole_ns(kind, (call * calls, token * tokens, small * few, attended * rows))

    return price
