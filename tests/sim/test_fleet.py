"""A fleet over one pool: what each request finds, who waits, what it costs, and the log of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.modelled.work import Work
from kvtape.planner.rows import RunRow
from kvtape.sim.blocks.block_trace import Requests
from kvtape.sim.blocks.policies.registry import choose_policy
from kvtape.sim.blocks.rules import PRESETS
from kvtape.sim.blocks.sweep import sweep
from kvtape.sim.costs.model import CostTable, KindCosts, Origin
from kvtape.sim.costs.pieces import in_pieces
from kvtape.sim.costs.terms import TERMS
from kvtape.sim.errors import SimulationError
from kvtape.sim.fleet.figures import figures
from kvtape.sim.fleet.pool import BlockPool
from kvtape.sim.fleet.recording import write_fleet_log
from kvtape.sim.fleet.serving import UNSERVED, Fleet, serve
from kvtape.sim.world.settings import Settings
from kvtape.traces.reader import open_log
from support.block_traces import block_trace
from support.command import kvtape
from support.imports import imported, written
from support.logs import run_row
from support.simulated import flat_costs

SIZE = 4
CHAINED = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=6).map(
        lambda path: [int("1" + "".join(map(str, path[: i + 1]))) for i in range(len(path))]
    ),
    min_size=1,
    max_size=20,
)
"""Prompts whose ids name the blocks before them too, as those of traces do."""
ROWS = "".join(
    f'{{"timestamp": {1000 * t}, "input_length": {512 * len(ids)}, "output_length": 3, "hash_ids": {ids}}}\n'
    for t, ids in enumerate([[1, 2], [1, 2, 3], [4], [1, 2], [4, 5], [1, 2, 3]])
)


def asked(prompts: Sequence[Sequence[int]], gap_ns: int = 10**9, output: int = 0) -> Requests:
    trace = block_trace(prompts, tail=SIZE, block_tokens=SIZE)
    n = len(prompts)
    lengths = np.array([SIZE * len(p) for p in prompts], np.int64)
    return Requests(trace, np.arange(n) * gap_ns + 7, lengths, np.full(n, output, np.int64))


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_a_pool_holds_what_is_in_use_and_never_more_than_its_size(data: st.DataObject) -> None:
    pool, running = BlockPool(data.draw(st.integers(1, 12))), []
    for path in data.draw(CHAINED):
        extra = data.draw(st.integers(0, 2))
        before = pool.used, pool.in_use, pool.evicted
        found = pool.acquire(path, extra)
        if found is None:
            assert (pool.used, pool.in_use, pool.evicted) == before
            assert before[1] + extra + len(path) > pool.size
        else:
            running.append((path, extra))
        assert pool.used <= pool.size
        assert pool.in_use == len({b for p, _ in running for b in p}) + sum(e for _, e in running)
        if running and data.draw(st.booleans()):
            pool.release(*running.pop(0))
    for path, extra in running:
        assert pool.acquire(path, 0) == len(path)
        pool.release(path, 0)
        pool.release(path, extra)
    assert pool.in_use == 0


@settings(deadline=None, max_examples=60)
@given(CHAINED)
def test_an_endless_pool_finds_the_longest_prefix_that_ever_came(prompts: list[list[int]]) -> None:
    served = serve(asked(prompts), Fleet(10_000), flat_costs())
    seen: set[int] = set()
    for path, reused in zip(prompts, served.reused.tolist(), strict=True):
        known = next((i for i, block in enumerate(path) if block not in seen), len(path))
        assert reused == min(known * SIZE, len(path) * SIZE - 1)
        seen |= set(path)


@settings(deadline=None, max_examples=60)
@given(CHAINED, st.integers(6, 12))
def test_one_request_at_a_time_hits_as_the_curve_of_lru_says(prompts: list[list[int]], budget: int) -> None:
    requests = asked(prompts)
    served = serve(requests, Fleet(budget, slots=1), flat_costs())
    rules = PRESETS["kvtape"].varied(weighting="block", warmup=0.0)
    (point,) = sweep(requests.trace, rules, [choose_policy("lru")], [budget]).points
    assert sum(-(-int(n) // SIZE) for n in served.reused) == point.hits


@settings(deadline=None, max_examples=80)
@given(CHAINED, st.integers(3, 12), st.integers(1, 3), st.integers(0, 3000), st.integers(0, 9))
def test_requests_begin_in_order_and_never_more_at_once_than_there_is_room_for(
    prompts: list[list[int]], size: int, slots: int, gap_ns: int, output: int
) -> None:
    served = serve(asked(prompts, gap_ns, output), Fleet(size, slots), flat_costs(decode=50.0))
    done = served.began != UNSERVED
    needs = np.array([len(p) + -(-output // SIZE) for p in prompts])
    assert done.tolist() == (needs <= size).tolist()
    began, ended = served.began[done], served.ended[done]
    assert (began >= served.arrived[done]).all()
    assert (np.diff(began) >= 0).all()
    assert served.peak_blocks <= size
    for at in began.tolist():
        assert ((began <= at) & (ended > at)).sum() <= slots


@settings(deadline=None)
@given(
    st.integers(1, 3000), st.integers(0, 3000), st.integers(1, 600), st.lists(st.floats(0, 1e5), min_size=6, max_size=6)
)
def test_a_price_in_pieces_is_that_of_its_calls(tokens: int, resident: int, piece: int, rates: list[float]) -> None:
    costs = CostTable(Origin("x"), {"prefill": KindCosts(tuple(rates[: len(TERMS["prefill"])]))})
    pieces = [(min(piece, tokens - at), resident + at) for at in range(0, tokens, piece)]
    one_by_one = sum(costs.cost_ns(Work("prefill", n, rows)) for n, rows in pieces)
    assert in_pieces(costs, "prefill", piece)(tokens, resident) == pytest.approx(one_by_one, rel=1e-9, abs=len(pieces))
    assert in_pieces(costs, "prefill", None)(tokens, resident) == costs.cost_ns(Work("prefill", tokens, resident))


def test_an_id_is_another_block_behind_other_blocks() -> None:
    served = serve(asked([[1, 2], [3, 2], [2]]), Fleet(9), flat_costs())
    assert served.reused.tolist() == [0, 0, 0]
    assert served.evicted == 0


def test_of_two_that_end_at_once_the_first_that_came_gives_way_first() -> None:
    served = serve(asked([[1], [2], [3], [2]], gap_ns=0), Fleet(2), flat_costs(prefill=1, decode=1))
    assert served.began.tolist() == [0, 0, served.ended[0], served.ended[0]]
    assert served.reused.tolist() == [0, 0, 0, SIZE - 1]


def test_a_wait_for_room_is_in_the_time_to_the_first_token() -> None:
    requests = asked([[1, 2], [3, 4], [1, 2]], gap_ns=0)
    served = serve(requests, Fleet(3), flat_costs())
    said = figures(requests, served)
    assert (said["ttft_p50_ns"], said["ttft_p95_ns"], said["queued_p95_ns"]) == (2000, 3000, 2000)
    assert served.began.tolist() == [0, 1000, 2000]
    assert served.prompted.tolist() == [1000, 2000, 3000]
    assert served.evicted == 2  # 2 leaves for 3 and 4, then 4 for 2
    assert served.reused.tolist() == [0, 0, SIZE]


def _run() -> RunRow:
    return run_row("r", kind="simulation")


def test_the_log_says_what_was_found_and_is_the_same_again(tmp_path: Path) -> None:
    requests = asked([[1, 2], [1, 2, 3], list(range(20, 29)), [1, 4]], output=6)
    served = serve(requests, Fleet(8, slots=1), flat_costs(decode=10.0))
    digests = []
    for name in ("a", "b"):
        write_fleet_log(tmp_path / f"{name}.duckdb", _run(), requests, served)
        assert kvtape("verify", tmp_path / f"{name}.duckdb").code == 0
        with open_log(tmp_path / f"{name}.duckdb") as log:
            digests.append(log.logical_digest("r"))
            rows = log.connection.sql("SELECT reused, completion_tokens FROM turns ORDER BY session_id").fetchall()
    assert digests[0] == digests[1]
    assert rows == [(0, 6), (8, 6), (None, 0), (4, 6)]
    assert figures(requests, served)["unserved"] == 1


def test_the_command_says_the_same_of_a_trace_and_of_its_log(tmp_path: Path) -> None:
    costs, trace = tmp_path / "costs.json", written(tmp_path, ROWS, "trace.jsonl")
    spec = "flops=1e14,bytes_per_s=1e12,params=8e9,weight_bytes=1.6e10,row_bytes=131072"
    assert kvtape("calibrate", "--roofline", spec, "--out", costs).code == 0
    with imported(tmp_path, ROWS, "sample"):
        pass
    common = ("--costs", costs, "--pool-blocks", 4, "--json")
    of_trace = kvtape("fleet", trace, *common, "--log", tmp_path / "fleet.duckdb")
    of_log = kvtape("fleet", tmp_path / "sample.duckdb", *common)
    assert (of_trace.code, of_log.code) == (0, 0), of_trace.err + of_log.err
    one, other = json.loads(of_trace.out), json.loads(of_log.out)
    assert one["figures"] == other["figures"]
    # 3 leaves for 4 and the answer behind it, 2 for 5: the fourth prompt finds 1 and 2, the last ones 4, and 1.
    assert one["figures"]["reused_tokens"] == 1024 + 1023 + 512 + 512
    assert one["assumed"] == ["hypothetical costs: from numbers of hardware, no log"]
    assert one["digest"] == json.loads(kvtape("fleet", trace, *common).out)["digest"]
    again = kvtape("fleet", tmp_path / "fleet.duckdb", *common)
    assert json.loads(again.out)["figures"] == one["figures"]


@pytest.mark.parametrize(
    ("fleet", "said"), [({"pool_blocks": 0}, "pool_blocks=0"), ({"pool_blocks": 1, "pace": float("nan")}, "pace nan")]
)
def test_a_fleet_that_cannot_be_is_refused(fleet: dict[str, float], said: str) -> None:
    with pytest.raises(SimulationError, match=said):
        Fleet(**fleet)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pace", "output", "token_ns", "said"),
    [(1e-12, 1, 1.0, "pace 1e-12"), (1.0, 10**9, 1e12, "292 years"), (1.0, 1, 1e308, "beyond all numbers")],
)
def test_times_that_no_log_can_bear_are_refused(pace: float, output: int, token_ns: float, said: str) -> None:
    rates = {kind: KindCosts(tuple(token_ns for _ in TERMS[kind])) for kind in ("prefill", "decode")}
    requests = asked([[1], [1, 2]], gap_ns=10**10, output=output)
    with pytest.raises(SimulationError, match=said):
        serve(requests, Fleet(10**9, pace=pace), CostTable(Origin("toy"), rates))


@given(st.sampled_from([0.1, 0.3, 1.7, 3.0]), st.integers(1, 10**17))
def test_a_fleet_paces_as_a_conversation_does(pace: float, gap_ns: int) -> None:
    served = serve(asked([[1], [1]], gap_ns=gap_ns), Fleet(8, pace=pace), flat_costs(prefill=1, decode=1))
    assert served.arrived.tolist() == [0, Settings(pace=pace).paced(gap_ns)]


def test_a_trace_without_blocks_is_refused_in_one_line(tmp_path: Path) -> None:
    trace = written(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n", "a.csv")
    costs = tmp_path / "costs.json"
    costs.write_text(json.dumps(flat_costs().to_json()), encoding="utf-8")
    ran = kvtape("fleet", trace, "--costs", costs, "--pool-blocks", 4, "--log", tmp_path / "out.duckdb")
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert "block ids" in ran.err
    assert not (tmp_path / "out.duckdb").exists()
