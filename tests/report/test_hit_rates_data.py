"""Hit rates of a report: what `kvtape curve` says, unless there is too much to ask, which is counted beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtape.report.data import hit_rates
from kvtape.report.data.hit_rates import HitRates, NoHitRates, hit_rates_of
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
