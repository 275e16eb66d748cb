"""From memory to the served context: arithmetic, reasons in their order, and no ratchet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.capacity.errors import CapacityError
from kvtape.capacity.profile import LayerKVProfile
from kvtape.capacity.resolve import ClampReason, MemoryBudget, ResolvedContext, ServedTokens, resolve

PER_TOKEN = 1000
PROFILE = LayerKVProfile(1, 0, 0, PER_TOKEN)


def served(memory: MemoryBudget, request: int | None = None, model_max: int = 8192) -> ResolvedContext:
    return resolve(model_max, PROFILE.inverse, memory, request)


def test_usable_memory_by_hand() -> None:
    memory = MemoryBudget(free=10_000, reserve=1000, limit=8000, reserved=500, weights=600, overhead=50)
    assert memory.usable == 6750  # min(9000, 7500) * 0.9
    assert memory.for_cache == 6100
    assert MemoryBudget(free=10_000, headroom=0.5).usable == 5000


@pytest.mark.parametrize("headroom", [0.0, 1.0, -0.2, 1.5, float("nan")])
def test_a_headroom_outside_its_range_is_the_default(headroom: float) -> None:
    assert MemoryBudget(free=10_000, headroom=headroom).usable == 9000


@pytest.mark.parametrize(
    ("memory", "request_", "effective", "reason"),
    [
        (MemoryBudget(free=10**8), None, 8192, None),
        (MemoryBudget(free=10**8), 4000, 4000, None),
        (MemoryBudget(free=10**8), 9000, 8192, ClampReason.REQUEST_EXCEEDS_MODEL),
        (MemoryBudget(free=5 * 10**6), None, 4500, ClampReason.MODEL_EXCEEDS_MEMORY),
        (MemoryBudget(free=5 * 10**6), 5000, 4500, ClampReason.REQUEST_EXCEEDS_MEMORY),
        (MemoryBudget(free=5 * 10**6), 4000, 4000, None),
        (MemoryBudget(free=10**6, reserve=2 * 10**6), 4000, 0, ClampReason.FREE_BELOW_RESERVE),
        (MemoryBudget(free=10**6, reserve=2 * 10**6), None, 0, ClampReason.FREE_BELOW_RESERVE),
        (MemoryBudget(free=10**8, limit=10**6), 4000, 900, ClampReason.REQUEST_EXCEEDS_USER_LIMIT),
        (MemoryBudget(free=10**6, reserve=2 * 10**6, limit=10**6), 4000, 0, ClampReason.REQUEST_EXCEEDS_USER_LIMIT),
        (MemoryBudget(free=10**8, limit=10**6), None, 900, ClampReason.MODEL_EXCEEDS_MEMORY),
        (MemoryBudget(free=2 * 10**6, limit=10**8), 4000, 1800, ClampReason.REQUEST_EXCEEDS_MEMORY),
        (MemoryBudget(free=10**8, weights=2 * 10**8), 10, 0, ClampReason.REQUEST_EXCEEDS_MEMORY),
        (MemoryBudget(free=10**6, reserve=10**6), 10, 0, ClampReason.REQUEST_EXCEEDS_MEMORY),
        (MemoryBudget(free=10**8, limit=10**6), 900, 900, None),
        (MemoryBudget(free=10**8, limit=10**6), 901, 900, ClampReason.REQUEST_EXCEEDS_USER_LIMIT),
    ],
)
def test_reasons_in_their_order(
    memory: MemoryBudget, request_: int | None, effective: int, reason: ClampReason | None
) -> None:
    found = served(memory, request_)
    assert (found.effective, found.clamp_reason) == (effective, reason)
    assert (found.request, found.model_max) == (request_, 8192)


def test_six_numbers_stay_apart() -> None:
    found = resolve(8192, PROFILE.inverse, MemoryBudget(free=5 * 10**6), 6000, hot_limit=1024, cold_tokens=300)
    numbers = (found.model_max, found.request, found.memory_tokens, found.effective, found.hot, found.planner)
    assert numbers == (8192, 6000, 4500, 4500, 1024, 1324)


memories = st.builds(
    MemoryBudget,
    free=st.integers(0, 10**8),
    reserve=st.integers(0, 10**7),
    limit=st.none() | st.integers(0, 10**8),
    reserved=st.integers(0, 10**6),
    weights=st.integers(0, 10**7),
    headroom=st.floats(0, 1),
)
requests = st.none() | st.integers(1, 20_000)


@given(memories, requests, st.integers(1, 10_000))
def test_a_request_only_lowers(memory: MemoryBudget, request_: int | None, model_max: int) -> None:
    free, asked = served(memory, None, model_max), served(memory, request_, model_max)
    assert asked.effective <= free.effective == min(model_max, free.memory_tokens)
    assert asked.memory_tokens == free.memory_tokens
    assert PROFILE.bytes(asked.effective) <= memory.for_cache
    lowered = asked.effective < (model_max if request_ is None else request_)
    assert lowered == (asked.clamp_reason is not None)


@given(memories, memories, requests)
def test_a_resolved_context_never_ratchets(small: MemoryBudget, large: MemoryBudget, request_: int | None) -> None:
    """Fed back, whole or by its served tokens, it means the request that it came from."""
    first = served(small, request_)
    for again in (first, first.effective):
        assert resolve(8192, PROFILE.inverse, large, again) == served(large, request_)
        assert resolve(8192, PROFILE.inverse, small, again) == first


def test_served_tokens_are_a_number_like_any_other() -> None:
    tokens = served(MemoryBudget(free=5 * 10**6)).effective
    assert isinstance(tokens, ServedTokens)
    assert (tokens + 1, f"{tokens}", tokens == 4500) == (4501, "4500", True)


@pytest.mark.parametrize("tokens", [0, -5])
def test_an_impossible_request(tokens: int) -> None:
    with pytest.raises(CapacityError, match="ask for 1 or more"):
        served(MemoryBudget(free=10**8), tokens)
