"""One pass over a trace against one run for each budget, against every cache that could be, and against definitions."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvtape.sim.blocks.accesses import Workload
from kvtape.sim.blocks.arrival import Fifos
from kvtape.sim.blocks.errors import CurveError
from kvtape.sim.blocks.identity import by_first_use, path_codes, stable_order
from kvtape.sim.blocks.policies.registry import CLASSES, choose_policy
from kvtape.sim.blocks.policies.running import run_policy
from kvtape.sim.blocks.recency import NEVER, count_below, stack_distances
from kvtape.sim.blocks.rules import PRESETS, Rules
from kvtape.sim.blocks.sweep import default_budgets, sweep
from support.block_traces import block_trace, naive_opt, paths, plain_rate, request_lists, single_rules

ALL_BUDGETS = list(range(1, 30))
rules_of_any_kind = st.builds(
    Rules,
    name=st.just("any"),
    weighting=st.sampled_from(["token", "block"]),
    prefix=st.sampled_from(["longest", "any"]),
    warmup=st.sampled_from([0.0, 0.5]),
    in_flight=st.sampled_from(["held", "none"]),
    bypass=st.booleans(),
    order=st.sampled_from(["root_last", "root_first"]),
    overlong=st.sampled_from(["full", "minus_one"]),
)


def rates(requests: list[list[int]], rules: Rules, policy: str, budgets: list[int]) -> list[int]:
    """Hits at each budget."""
    return [p.hits for p in sweep(block_trace(requests), rules, [choose_policy(policy)], budgets).points]


@given(request_lists)
def test_a_block_is_its_whole_path(requests: list[list[int]]) -> None:
    trace = block_trace(requests)
    codes = path_codes(by_first_use(trace.ids), trace.starts)
    wanted = [p for path in paths(requests) for p in path]
    number = {p: i for i, p in enumerate(dict.fromkeys(wanted))}
    assert codes.tolist() == [number[p] for p in wanted]


@given(st.lists(st.integers(0, 2**40) | st.integers(0, 3), max_size=30))
def test_codes_count_first_uses_and_orders_are_stable(values: list[int]) -> None:
    keys = np.array(values, np.int64)
    number = {v: i for i, v in enumerate(dict.fromkeys(values))}
    assert by_first_use(keys).tolist() == [number[v] for v in values]
    assert stable_order(keys).tolist() == sorted(range(len(values)), key=values.__getitem__)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=40), st.data())
def test_counts_of_smaller_values_are_counts(values: list[int], data: st.DataObject) -> None:
    n = len(values)
    places = st.tuples(st.integers(0, n), st.integers(0, n)).map(sorted)
    queries = data.draw(st.lists(st.tuples(places, st.integers(0, 25)), max_size=10))
    start, stop, limit = (
        (np.array(x, np.int64) for x in zip(*((*p, v) for p, v in queries), strict=True))
        if queries
        else (np.zeros(0, np.int64) for _ in range(3))
    )
    found = count_below(np.array(values, np.int64), start, stop, limit)
    assert found.tolist() == [sum(v < limit for v in values[a:b]) for (a, b), limit in queries]


@given(request_lists)
def test_a_stack_distance_counts_the_other_blocks_since(requests: list[list[int]]) -> None:
    a = Workload(block_trace(requests), single_rules).root_first
    blocks = a.blocks.tolist()
    for i, distance in enumerate(stack_distances(a).tolist()):
        if blocks[i] in blocks[:i]:
            last = max(j for j in range(i) if blocks[j] == blocks[i])
            assert distance == len(set(blocks[last + 1 : i]))
        else:
            assert distance == NEVER


@given(request_lists, st.sampled_from(["held", "none"]))
def test_lru_at_all_budgets_is_lru_at_each(requests: list[list[int]], in_flight: str) -> None:
    order = "root_last" if in_flight == "held" else "root_first"
    rules = Rules().varied(in_flight=in_flight, order=order, prefix="any", weighting="block", warmup=0.0)
    a = getattr(Workload(block_trace(requests), rules), order)
    one_by_one = [int(run_policy(choose_policy("lru"), a, b, held=in_flight == "held").sum()) for b in ALL_BUDGETS]
    assert rates(requests, rules, "lru", ALL_BUDGETS) == one_by_one


@given(request_lists, st.booleans(), st.sampled_from(["root_first", "root_last"]), st.sampled_from(["path", "id"]))
def test_fifo_without_a_queue_is_fifo_with_one(
    requests: list[list[int]], held: bool, order: str, identity: str
) -> None:
    if held:
        identity = "path"
    rules = Rules(in_flight="held" if held else "none", identity=identity)  # type: ignore[arg-type]
    a = getattr(Workload(block_trace(requests), rules), order)
    fifos = Fifos(a, held=held)
    for budget in ALL_BUDGETS:
        with_queue = run_policy(choose_policy("fifo"), a, budget, held=held)
        assert fifos.hits(budget).tolist() == with_queue.tolist()


small = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), min_size=1, max_size=7)


@settings(max_examples=60)
@given(small, st.integers(1, 4))
def test_opt_has_the_most_hits_of_all_caches_that_look_up_whole_requests(
    requests: list[list[int]], budget: int
) -> None:
    rules = Rules().varied(weighting="block", prefix="any", warmup=0.0)
    steps = [frozenset[object](path) for path in paths(requests)]
    assert rates(requests, rules, "opt", [budget]) == [naive_opt(steps, budget, bypass=True)]


@settings(max_examples=60)
@given(small, st.integers(1, 4), st.booleans())
def test_opt_has_the_most_hits_of_all_caches_that_go_block_by_block(
    requests: list[list[int]], budget: int, bypass: bool
) -> None:
    steps = [frozenset[object]([i]) for request in requests for i in request]
    rules = replace(single_rules, bypass=bypass)
    assert rates(requests, rules, "opt", [budget]) == [naive_opt(steps, budget, bypass=bypass)]


@given(request_lists, rules_of_any_kind)
def test_more_budget_never_costs_lru_or_opt_a_hit(requests: list[list[int]], rules: Rules) -> None:
    for policy in ("lru", "opt"):
        found = rates(requests, rules, policy, ALL_BUDGETS)
        assert found == sorted(found)


@given(request_lists, rules_of_any_kind.filter(lambda r: r.in_flight == "none" or r.bypass))
def test_no_policy_has_more_hits_than_opt(requests: list[list[int]], rules: Rules) -> None:
    rules = replace(rules, weighting="block", warmup=0.0, overlong="full")
    if rules.in_flight == "none":
        rules = replace(rules, prefix="any", bypass=True)
    best = rates(requests, rules, "opt", ALL_BUDGETS)
    for policy in CLASSES:
        assert all(mine <= bound for mine, bound in zip(rates(requests, rules, policy, ALL_BUDGETS), best, strict=True))


@given(request_lists, rules_of_any_kind, st.sampled_from(["lru", "opt"]))
def test_one_pass_over_all_budgets_is_one_sweep_of_each(requests: list[list[int]], rules: Rules, policy: str) -> None:
    trace = block_trace(requests)
    steps = sweep(trace, rules, [choose_policy(policy)], "all").points
    assert [p.budget_blocks for p in steps] == sorted({p.budget_blocks for p in steps})
    each = rates(requests, rules, policy, ALL_BUDGETS)
    assert [max((p.hits for p in steps if p.budget_blocks <= b), default=0) for b in ALL_BUDGETS] == each


def leaf_lru(requests: list[list[int]], budget: int) -> list[list[bool]]:
    """LRU over a tree: goes the least recently used block that nothing stands behind and the request did not find."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = []
    for path in paths(requests):
        row = [block in cache for block in path]
        hits.append(row)
        found = [block for block, hit in zip(path, row, strict=True) if hit]
        for block in found:
            cache.move_to_end(block)
        for block in path[len(found) :]:
            if len(cache) == budget:
                leaves = [b for b in cache if b not in found and not any(c[: len(b)] == b and c != b for c in cache)]
                if not leaves:
                    break
                del cache[leaves[0]]
            if len(block) > 1 and block[:-1] not in cache:
                break
            cache[block] = None
    return hits


@settings(max_examples=150)
@given(request_lists, st.integers(1, 12))
@example([[0, 1, 2], [0, 1, 2], [0], [0, 1, 2]], 2)
def test_lru_over_leaves_with_one_place_lost_to_a_long_request(requests: list[list[int]], budget: int) -> None:
    rules = replace(PRESETS["kvcache-simulator"], underfilled="keep", warmup=0.0)
    weights = [[4] * len(r) for r in requests]
    hits, _ = plain_rate(leaf_lru(requests, budget), weights, rules)
    assert rates(requests, rules, "lru", [budget]) == [hits]


@given(request_lists, rules_of_any_kind, st.integers(1, 4))
def test_a_rate_is_its_definition(requests: list[list[int]], rules: Rules, tail: int) -> None:
    rules = replace(rules, order="root_first")
    trace = block_trace(requests, tail)
    a = Workload(trace, rules).root_first
    found = run_policy(choose_policy("sieve"), a, 4, held=rules.in_flight == "held").tolist()
    weights = [[4 if rules.weighting == "token" else 1] * len(r) for r in requests]
    if rules.weighting == "token":
        for row in weights:
            row[-1] = tail
    rows = [found[i:j] for i, j in zip(trace.starts.tolist(), trace.starts[1:].tolist(), strict=False)]
    hits, total = plain_rate(rows, weights, rules)
    curve = sweep(trace, rules, [choose_policy("sieve")], [4])
    assert (curve.points[0].hits, curve.total) == (hits, total)
    assert curve.points[0].hit_rate == hits / total


def test_budgets_of_a_default_sweep() -> None:
    assert default_budgets(1) == [1]
    assert default_budgets(5) == [1, 2, 4, 5]
    assert default_budgets(1000) == [16, 32, 64, 128, 256, 512, 1000]


def test_an_endless_cache_is_the_ceiling() -> None:
    requests = [[0, 1], [0, 1, 2], [1], [0, 1, 2]]
    curve = sweep(block_trace(requests), Rules().varied(warmup=0.0), [choose_policy("lru")], None)
    assert curve.points[-1].budget_blocks == curve.n_blocks == 4
    assert curve.points[-1].hit_rate == curve.ceiling == 5 / 9


def test_what_is_no_rule_is_refused() -> None:
    with pytest.raises(CurveError, match=r"warm-up 1\.0.*below 1"):
        Rules(warmup=1.0)
    with pytest.raises(CurveError, match="warm-up nan"):
        Rules(warmup=float("nan"))
    with pytest.raises(CurveError, match="held as paths"):
        Rules(identity="id")
    with pytest.raises(CurveError, match="at least one block"):
        sweep(block_trace([[1]]), Rules(), [choose_policy("lru")], [0])
    with pytest.raises(CurveError, match="fifo: no pass gives it all budgets at once"):
        sweep(block_trace([[1]]), Rules(), [choose_policy("fifo")], "all")
