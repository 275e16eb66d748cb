"""Hit rates of a report: what `kvtape curve` says, unless there is too much to ask, which is counted beforehand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvtape.report.data import hit_rates
from kvtape.report.data.hit_rates import HitRates, NoHitRates, given_hit_rates, hit_rates_of
from kvtape.report.given.reading import Subject, read_given
from kvtape.sim.blocks.from_log import read_log
from kvtape.traces.reader import open_log
from support.command import kvtape

TRACE = Path(__file__).parents[2] / "examples" / "traces" / "requests.jsonl"


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = tmp_path_factory.mktemp("imported") / "i.duckdb"
    assert kvtape("import", TRACE, "--format", "mooncake", "--log", log).code == 0
    return log


def test_the_bound_is_under_no_policy_and_rates_never_fall_with_the_budget(imported: Path) -> None:
    with open_log(imported) as log:
        found = hit_rates_of(log, log.default_run().run_id)
    assert isinstance(found, HitRates)
    rates = {curve.policy: curve.hit_rates for curve in found.curves}
    assert (list(rates), found.above_bound) == (["fifo", "lru", "opt"], ())
    for policy, of in rates.items():
        assert all(rate <= most <= found.ceiling for rate, most in zip(of, rates["opt"], strict=True)), policy
        assert policy == "fifo" or list(of) == sorted(of)


def test_of_very_many_budgets_some_are_kept_with_both_ends(imported: Path, tmp_path: Path) -> None:
    ran = kvtape("curve", imported, "--budget-blocks", "all", "--warmup", 0, "--policy", "lru", "--json")
    said = json.loads(ran.out)
    said["rows"] = [said["rows"][0] | {"budget_blocks": b, "hit_rate": b / 5000} for b in range(1, 5001)]
    (tmp_path / "c.json").write_text(json.dumps(said), encoding="utf-8")
    subject = Subject("i", frozenset({said["source_digest"]}), frozenset())
    (found,) = given_hit_rates(read_given([tmp_path / "c.json"], subject))
    (curve,) = found.curves
    assert (curve.of_budgets, curve.budgets[0], curve.budgets[-1]) == (5000, 1, 5000)
    assert len(curve.budgets) <= hit_rates.MOST_BUDGETS
    assert list(curve.hit_rates) == [b / 5000 for b in curve.budgets]


def test_blocks_are_counted_before_they_are_read(imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_log(imported) as log:
        run = log.default_run().run_id
        n = read_log(log, run).n_accesses
        monkeypatch.setattr(hit_rates, "MOST_ACCESSES", n - 1)
        assert hit_rates_of(log, run) == NoHitRates(
            f"its prompts ask for about {n} blocks, more than a report computes with", too_many=True
        )
        monkeypatch.setattr(hit_rates, "MOST_ACCESSES", n)
        assert isinstance(hit_rates_of(log, run), HitRates)
