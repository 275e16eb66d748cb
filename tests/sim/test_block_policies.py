"""What every policy class owes, and golden hit counts of a public trace."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.planner.grammar import SpecError
from kvtape.sim.blocks.accesses import Workload
from kvtape.sim.blocks.errors import PolicyBroken
from kvtape.sim.blocks.from_file import read_trace_file
from kvtape.sim.blocks.policies.registry import CLASSES, PolicyChoice, choose_policy
from kvtape.sim.blocks.policies.running import run_policy
from kvtape.sim.blocks.rules import PRESETS
from kvtape.sim.blocks.sweep import sweep
from support.block_traces import block_trace, single_rules
from support.imports import public_trace

LIBCACHESIM_HITS = {
    "fifo": [12579, 24411, 70297],
    "lru": [12831, 25259, 76613],
    "lfu": [13871, 24874, 52278],
    "sieve": [13871, 24874, 52278],
    "arc": [15292, 28451, 78726],
    "s3fifo": [15757, 34068, 62811],
    "opt": [55594, 93564, 105710],
}
"""Of 288,500 accesses of the Mooncake conversation trace at 1,024, 4,096 and 16,384 blocks: libcachesim 0.3.5."""

KVCACHE_SIMULATOR_HITS = {
    "fifo": [
        1467392,
        1943040,
        2369024,
        2661376,
        2851400,
        2961480,
        3106872,
        3728351,
        5806048,
        11210017,
        16348500,
        21376864,
        24445347,
    ],
    "lru": [
        3080192,
        3080192,
        3080192,
        3080581,
        3082824,
        3085579,
        3194814,
        3833192,
        5935037,
        12781765,
        18940960,
        24161208,
        26055540,
    ],
    "opt": [
        3473388,
        3812262,
        4407972,
        5415511,
        7034301,
        9628909,
        13516455,
        18226289,
        23452732,
        27038068,
        27038068,
        27038068,
        27038068,
    ],
}
"""Tokens of 67,915,607 at 16, 32, ... 65,536 blocks: kvcache-simulator 0.1.3, Llama 3.1 8B in bf16."""


@pytest.mark.parametrize("name", sorted(CLASSES))
@given(st.integers(1, 12), st.lists(st.integers(0, 15), max_size=80))
def test_a_cache_holds_its_budget_at_most_and_finds_what_it_holds(name: str, budget: int, blocks: list[int]) -> None:
    policy = CLASSES[name](budget)
    seen: set[int] = set()
    for block in blocks:
        held = {b for b in range(16) if b in policy}
        assert len(policy) == len(held) <= budget
        assert held <= seen
        assert policy.access(block) == (block in held)
        seen.add(block)


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_what_fits_is_never_evicted(name: str) -> None:
    policy = CLASSES[name](10)
    assert [policy.access(b) for b in range(10)] == [False] * 10
    # W-TinyLFU has a place for each block as well, and only its window moves.
    assert [policy.access(b) for b in range(10)] == [True] * 10


def test_frequency_outlives_recency_where_it_should() -> None:
    hot_then_scan = [1, 2] * 5 + list(range(10, 30)) + [1, 2]
    kept = {name: [CLASSES[name](4)] for name in ("lru", "lfu")}
    hits = {name: [p.access(b) for b in hot_then_scan][-2:] for name, (p,) in kept.items()}
    assert hits == {"lru": [False, False], "lfu": [True, True]}


@pytest.mark.parametrize("policy", sorted(LIBCACHESIM_HITS))
def test_hits_of_a_public_trace_are_those_of_libcachesim(policy: str) -> None:
    trace = read_trace_file(public_trace("mooncake/conversation_trace.jsonl"))
    curve = sweep(trace, PRESETS["libcachesim"], [choose_policy(policy)], [1024, 4096, 16384])
    assert [p.hits for p in curve.points] == LIBCACHESIM_HITS[policy]
    assert curve.total == 288_500


def test_hits_of_a_public_trace_are_those_of_kvcache_simulator() -> None:
    trace = read_trace_file(public_trace("mooncake/conversation_trace.jsonl"))
    policies = [choose_policy(name) for name in KVCACHE_SIMULATOR_HITS]
    curve = sweep(trace, PRESETS["kvcache-simulator"], policies)
    found = {name: [p.hits for p in curve.points if p.policy == name] for name in KVCACHE_SIMULATOR_HITS}
    assert found == KVCACHE_SIMULATOR_HITS
    assert curve.total == 67_915_607
    assert [p.budget_blocks for p in curve.points[:13]] == [16 << i for i in range(13)]
    assert curve.omitted == [131_072, 182_790]


class Newest:
    """The user's own: holds the last block only."""

    def __init__(self, budget: int) -> None:
        self.last: int | None = None

    def access(self, block: int) -> bool:
        hit = block == self.last
        self.last = block
        return hit

    def __contains__(self, block: int) -> bool:
        return block == self.last

    def __len__(self) -> int:
        return 1


class Liar(Newest):
    def access(self, block: int) -> bool:
        super().access(block)
        return True


class Hoarder(Newest):
    def __len__(self) -> int:
        return 10**6


class Failing(Newest):
    def access(self, block: int) -> bool:
        raise KeyError("lost it")


def test_a_policy_of_the_users_own_runs() -> None:
    a = Workload(block_trace([[1, 1, 2], [2, 1]]), single_rules).root_first
    assert run_policy(PolicyChoice("own", Newest, own=True), a, 3, held=False).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Liar, "finds a block that never came before"),
        (Hoarder, "holds 1000000 blocks with a budget of 3"),
        (Failing, "KeyError: 'lost it'"),
    ],
)
def test_a_policy_that_does_what_no_cache_can_is_named(policy: type[Newest], message: str) -> None:
    a = Workload(block_trace([[1, 2], [3]]), single_rules).root_first
    with pytest.raises(PolicyBroken, match=f"policy own: .*{message}"):
        run_policy(PolicyChoice("own", policy, own=True), a, 3, held=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lruu", "unknown policy 'lruu', did you mean 'lru'.*or module:Class"),
        ("lru:budget=5", "take no options; the budgets are --budget-blocks"),
        ("no_such_module:Thing", "no module 'no_such_module'; put its folder on PYTHONPATH"),
        ("collections:Thing", "module 'collections' has no class 'Thing'"),
        ("", "is no name"),
    ],
)
def test_what_is_no_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        choose_policy(text)


def test_a_class_whose_module_fails_is_a_bad_spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_cache.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        SpecError, match=r"importing 'broken_cache' failed: ZeroDivisionError: division by zero; mend it"
    ):
        choose_policy("broken_cache:Mine")
