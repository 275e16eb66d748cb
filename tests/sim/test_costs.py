"""Costs: rates are found again, outliers do not move them, files are checked, other models' costs are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.backends.modelled.work import Work
from kvtape.backends.session import Session
from kvtape.planner.events import BlockRef, Op, Way
from kvtape.sim.costs.calibrate import calibrate, calibrate_samples
from kvtape.sim.costs.fitting import fit, nonnegative
from kvtape.sim.costs.model import CostTable, Fit, KindCosts, Origin, read_costs
from kvtape.sim.costs.roofline import roofline_costs
from kvtape.sim.costs.samples import Sample, samples_of
from kvtape.sim.costs.terms import TERMS, counts
from kvtape.sim.errors import CostsError
from kvtape.sim.world.shapes import check_costs
from support.logs import event, run_row, session_row
from support.simulated import MemoryLog, flat_costs, recorded_toy

NEGATIVE = (
    '{"schema": "kvtape.costs/2", "origin": {"backend": "x"}, "kinds": {"session": {"terms": '
    '[{"name": "call", "unit": "ns", "rate": -1}]}}}'
)
RATES = st.lists(st.floats(0, 1e6), min_size=3, max_size=3)


@settings(deadline=None, max_examples=60)
@given(RATES, st.integers(0, 2**32 - 1))
def test_rates_that_made_the_times_are_found_again(rates: list[float], seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.column_stack((np.ones(40), rng.integers(1, 500, 40), rng.integers(0, 10**5, 40))).astype(float)
    y = x @ np.array(rates)
    assert fit(x, y) @ x.T == pytest.approx(y, rel=1e-5, abs=1.0)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_nonnegative_satisfies_the_conditions_of_the_optimum(k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(20, k)), rng.normal(size=20)
    gram, moment = x.T @ x, x.T @ y
    found = nonnegative(gram, moment)
    gradient = gram @ found - moment
    assert (found >= 0).all()
    assert (gradient >= -1e-8).all()  # going up helps nowhere (Karush, Kuhn, Tucker)
    assert np.abs(gradient[found > 0]).max(initial=0.0) < 1e-8


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 12),
    st.integers(1, 5),
    st.lists(st.one_of(st.just(0.0), st.floats(1, 1e15)), min_size=12, max_size=12),
    st.integers(0, 2**32 - 1),
)
def test_whatever_was_recorded_rates_are_finite_and_not_negative(n: int, k: int, times: list[float], seed: int) -> None:
    counts_of = np.random.default_rng(seed).integers(0, 3, (n, k)).astype(float)
    found = fit(counts_of, np.array(times[:n]))
    assert np.isfinite(found).all()
    assert (found >= 0).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_times_and_counts_that_are_none_are_refused(bad: float) -> None:
    good = np.ones((3, 1)), np.ones(3)
    with pytest.raises(ValueError, match="negative or not finite"):
        fit(good[0], np.array([1.0, bad, 1.0]))
    with pytest.raises(ValueError, match="negative or not finite"):
        fit(np.array([[1.0], [bad], [1.0]]), good[1])


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 500), st.lists(st.integers(1, 10**9), min_size=1, max_size=5))
def test_one_size_alone_is_scaled_to_others(tokens: int, times: list[int]) -> None:
    """Calls, tokens and rows say the same there, and which of them costs cannot be seen: the tokens are taken."""
    samples = [Sample((Work("rebuild", tokens),), ns, i) for i, ns in enumerate(times)]
    costs = CostTable(Origin("x"), calibrate_samples(samples))
    price = costs.cost_ns(Work("rebuild", tokens))
    assert min(times) - 1 <= price <= max(times) + 1
    assert costs.cost_ns(Work("rebuild", 3 * tokens)) == pytest.approx(3 * price, rel=1e-9, abs=2)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(2, 9))
def test_terms_that_say_the_same_share_nothing(seed: int, factor: int) -> None:
    """Resident rows that are always a multiple of the tokens: the sum is right, and no term takes from another."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 200, 30).tolist()
    samples = [Sample((Work("evict", n, factor * n),), 1000 + 70 * n, i) for i, n in enumerate(sizes)]
    costs = CostTable(Origin("x"), calibrate_samples(samples))
    assert all(costs.cost_ns(s.works[0]) == pytest.approx(s.elapsed_ns, rel=1e-3, abs=2) for s in samples)
    assert min(costs.kinds["evict"].rates) >= 0


def test_a_few_interrupted_calls_do_not_move_the_rates() -> None:
    n = np.arange(1.0, 61.0)
    x = np.column_stack((np.ones(60), n))
    y = 1000 + 50 * n
    y[::10] *= 8
    assert fit(x, y) == pytest.approx([1000, 50], rel=0.02)


def test_a_column_that_never_counts_has_no_rate() -> None:
    assert fit(np.column_stack((np.ones(5), np.zeros(5))), np.full(5, 7.0)) == pytest.approx([7, 0])


def test_a_decode_costs_what_its_tokens_cost_one_by_one() -> None:
    whole = counts(Work("decode", 32, 100))
    single = np.sum([counts(Work("decode", 1, 100 + i)) for i in range(32)], axis=0)
    assert whole[1:3] == pytest.approx(single[1:3])


def test_samples_say_what_each_event_did() -> None:
    rows = {"kv_bytes": 1000, "resident_tokens": 10}
    events = [
        event(0, Op.OPEN),
        event(1, Op.PREFILL, n_tokens=10, elapsed_ns=5, **rows),
        event(
            2,
            Op.EVICT,
            n_tokens=4,
            elapsed_ns=7,
            way=Way.GAP,
            cold=True,
            blocks=(BlockRef(0, 2, 6),),
            resident_tokens=6,
        ),
        event(3, Op.SHIFT, n_tokens=4, elapsed_ns=1, resident_tokens=6),
        event(4, Op.DECODE, n_tokens=2, elapsed_ns=9, resident_tokens=8),
        event(5, Op.EVICT, n_tokens=4, elapsed_ns=70, way=Way.RECOMPUTE, physical_prefill_tokens=4, resident_tokens=4),
    ]
    found = {s.seq: s.works for s in samples_of(events) if s.works[0].kind != "session"}
    assert found == {
        1: (Work("prefill", 10, 0),),
        2: (Work("export", 4, 10, 400), Work("evict", 4, 10)),
        3: (Work("shift", 4, 6),),
        4: (Work("decode", 2, 6, 0, 4),),
        5: (Work("rebuild", 4),),
    }


def test_a_plan_does_not_pay_for_its_measuring_again() -> None:
    events = [event(0, Op.OPEN), event(1, Op.SCORE, elapsed_ns=40), event(2, Op.PLAN, elapsed_ns=100)]
    assert [s.elapsed_ns for s in samples_of(events) if s.works[0].kind == "plan"] == [60]


def _log(**row: object) -> MemoryLog:
    def play(session: Session) -> None:
        session.ensure_prefix(list(range(30)))
        session.decode(8, stop_tokens=frozenset())

    sink = recorded_toy(play)
    sink.sessions[0] = dataclasses.replace(sink.sessions[0], **row)
    return MemoryLog([sink])


def test_a_model_survives_its_file_and_says_whose_it_is(tmp_path: Path) -> None:
    costs = calibrate([_log()], machine="m", kvtape_version="1")
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(costs.to_json()), encoding="utf-8")
    again = read_costs(path)
    assert again == costs
    assert (again.origin.backend, again.origin.machine, again.origin.logs) == ("toy", "m", ("0" * 64,))
    fitted = again.kinds["prefill"].fit
    assert fitted is not None
    assert (fitted.events, fitted.tokens, fitted.resident) == (4, (6, 8), (0, 24))
    assert len(fitted.residuals_ns) == 5


def test_what_a_log_does_not_show_has_a_stand_in_or_no_price() -> None:
    costs = flat_costs(without=("refill", "score", "admit", "restore"))
    assert costs.cost_ns(Work("refill", 5)) == costs.cost_ns(Work("prefill", 5))
    assert costs.stand_ins == {"refill": "prefill", "score": "prefill"}
    assert costs.missing == ["admit", "restore"]
    with pytest.raises(CostsError, match="say nothing of admit"):
        costs.cost_ns(Work("admit", 1))


def test_a_report_names_what_its_prices_rest_on_and_no_other() -> None:
    rough_fit = Fit(4, None, 0.945, 2.0, (0.0,) * 5, (1, 9), (1, 9))
    fine_fit = dataclasses.replace(rough_fit, median_error=0.25)
    flat = flat_costs(without=("refill",))
    rates = flat.kinds["admit"].rates
    costs = CostTable(Origin("x"), flat.kinds | {"admit": KindCosts(rates, rough_fit)})
    rough = "the price of admit is rough: half of the 4 calibrated were off by 94% or more"
    assert costs.assumptions({"prefill"}) == []
    assert costs.assumptions({"admit", "refill", "prefill"}) == ["refill costs what prefill costs", rough]
    fine = CostTable(Origin("x"), flat.kinds | {"admit": KindCosts(rates, fine_fit)})
    assert fine.assumptions({"admit"}) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "schema None"),
        ('{"schema": "kvtape.costs/9"}', "schema 'kvtape.costs/9'"),
        ('{"schema": "kvtape.costs/2", "origin": {}, "kinds": {}}', "damaged"),
        ('{"schema": "kvtape.costs/2", "origin": {"backend": "x"}, "kinds": {"fly": {}}}', "damaged"),
        (
            NEGATIVE,
            "negative",
        ),
    ],
)
def test_a_bad_cost_file_is_one_clear_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CostsError, match=said) as err:
        read_costs(path)
    assert "bad.json" in str(err.value)


def test_a_missing_cost_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(CostsError, match="kvtape calibrate"):
        read_costs(tmp_path / "no.json")


@pytest.mark.parametrize(
    "other", [{"model_fingerprint": "llama/9"}, {"backend": "openvino"}, {"threads": 9}, {"kv_type_k": "q8_0"}]
)
def test_costs_of_another_model_or_setting_are_refused(other: dict[str, object]) -> None:
    row = session_row()
    origin = Origin("llama", "1", row.model_fingerprint, row.model_name, row.threads, row.kv_type_k, row.kv_type_v)
    check_costs(CostTable(origin, {}), row)
    with pytest.raises(CostsError, match="calibrate on a log"):
        check_costs(CostTable(origin, {}), dataclasses.replace(row, **other))


def test_costs_of_another_model_name_the_parts_that_differ() -> None:
    row = dataclasses.replace(session_row(), model_fingerprint="a/b/c/1/d/e")
    origin = Origin("llama", "1", "a/b/c/1/d/f", row.model_name, row.threads, row.kv_type_k, row.kv_type_v)
    with pytest.raises(CostsError, match=r": different weights \(f, given e\); calibrate on a log of that model$"):
        check_costs(CostTable(origin, {}), row)


def test_logs_of_two_engines_are_not_one_model() -> None:
    with pytest.raises(CostsError, match="different engines"):
        calibrate([_log(), _log(backend="other")], machine=None, kvtape_version="1")


def test_a_log_without_times_cannot_be_calibrated_on() -> None:
    log = _log()
    log.sinks[0].events = [dataclasses.replace(e, elapsed_ns=None) for e in log.sinks[0].events[:1]]
    with pytest.raises(CostsError, match="no event of an engine"):
        calibrate([log], machine=None, kvtape_version="1")


def test_a_simulation_is_no_machine() -> None:
    log = _log()
    log.default_run = lambda: run_row("r", kind="simulation")  # type: ignore[method-assign]
    with pytest.raises(CostsError, match="is a simulation"):
        calibrate([log], machine=None, kvtape_version="1")


def test_kinds_recorded_together_are_told_apart() -> None:
    samples = [
        Sample((Work("export", n, 100, 10 * n), Work("evict", n, 100)), 300 + 10 * n * 3, n) for n in range(8, 64, 4)
    ] + [Sample((Work("evict", n, 100),), 300, n) for n in range(8, 64, 4)]
    costs = CostTable(Origin("x"), calibrate_samples(samples))
    assert costs.cost_ns(Work("evict", 30, 100)) == pytest.approx(300, rel=1e-3)
    assert costs.cost_ns(Work("export", 30, 100, 300)) == pytest.approx(900, rel=1e-2)


def test_a_roofline_is_labelled_and_orders_costs() -> None:
    text = "flops=1e11,bytes_per_s=2e10,params=1.3e8,weight_bytes=1.4e8,row_bytes=23040"
    costs = roofline_costs(text, machine=None, kvtape_version="1")
    assert costs.origin.hypothetical
    assert costs.cost_ns(Work("prefill", 512)) < 512 * costs.cost_ns(Work("decode", 1))
    assert costs.cost_ns(Work("decode", 1, 4000)) > costs.cost_ns(Work("decode", 1, 0))
    assert costs.cost_ns(Work("decode", 1)) == round((1.4e8 + 23040) / 2e10 * 1e9)


BEYOND = "flops=1e-300,bytes_per_s=1e-300,params=1e300,weight_bytes=1e300,row_bytes=1"


@pytest.mark.parametrize(
    "text", ["", "flops=1", "flops=1,flops=2", "flops=x", "flops=nan", "speed=1", "flops=-1", BEYOND]
)
def test_a_bad_roofline_says_what_to_write(text: str) -> None:
    with pytest.raises(CostsError, match="--roofline"):
        roofline_costs(text, machine=None, kvtape_version="1")


def test_every_kind_has_terms_that_count() -> None:
    for kind, terms in TERMS.items():
        assert len(counts(Work(kind, 3, 5, 7, 2))) == len(terms)
        assert KindCosts((0.0,) * len(terms)).fit is None
