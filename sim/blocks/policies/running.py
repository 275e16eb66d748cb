"""Running a policy class over accesses, one budget at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvtape.sim.blocks.accesses import Accesses
from kvtape.sim.blocks.errors import PolicyBroken
from kvtape.sim.blocks.policies.protocol import Policy
from kvtape.sim.blocks.policies.registry import PolicyChoice

__all__ = ["run_policy"]

Bools = npt.NDArray[np.bool_]


def run_policy(choice: PolicyChoice, a: Accesses, budget: int, *, held: bool) -> Bools:
    """Which accesses find their block. `held` looks a whole request up before it admits any of it. bool [accesses].

    Raises PolicyBroken when a policy of the user's own finds what never came, holds more than its budget, or fails.
    """
    assert choice.make is not None
    if not choice.own:
        return _run(choice.make(budget), a, budget, held=held, check=None)
    try:
        return _run(choice.make(budget), a, budget, held=held, check=choice.name)
    except PolicyBroken:
        raise
    except Exception as err:
        raise PolicyBroken(f"policy {choice.name}: {type(err).__name__}: {err}") from err


def _run(policy: Policy, a: Accesses, budget: int, *, held: bool, check: str | None) -> Bools:
    blocks, starts = a.blocks.tolist(), a.starts.tolist()
    if check is None and not held:
        return np.fromiter(map(policy.access, blocks), np.bool_, len(blocks))
    found: list[bool] = []
    for start, stop in pairwise(starts):
        path = blocks[start:stop]
        if held:
            found += [block in policy for block in path]
            for block in path:
                policy.access(block)
        else:
            found += map(policy.access, path)
        if check is not None and len(policy) > budget:
            raise PolicyBroken(f"policy {check}: holds {len(policy)} blocks with a budget of {budget}")
    hits = np.array(found, np.bool_)
    if check is not None and (hits & (a.before < 0)).any():
        raise PolicyBroken(f"policy {check}: finds a block that never came before; say False for a first access")
    return hits
