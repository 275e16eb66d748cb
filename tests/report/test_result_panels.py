"""The panels of results, on a log of a real engine with everything that other verbs make of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.proofs.store import shipped_rows
from kvtape.eval.gate.report import body_of, percent
from kvtape.report.figures.equality import equality_panel
from kvtape.report.figures.policies import policies_panel
from kvtape.report.figures.proofs import proofs_panel
from kvtape.report.figures.rules import rules_panel
from kvtape.report.page import PageMeta, page
from kvtape.report.panel import Panel, Table
from kvtape.report.panels import make_panels
from kvtape.report.sources import Sources, choose
from kvtape.sim.blocks.from_log import read_log
from kvtape.sim.fidelity import first_difference
from kvtape.traces.reader import open_log
from support.command import kvtape
from support.forge import edit_log
from support.report_results import RESULTS

MakePanel = Callable[[Sources], Panel]


@pytest.fixture(scope="module")
def folder(results: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy that is added to."""
    return shutil.copytree(results, tmp_path_factory.mktemp("panels") / "results")


def said(folder: Path, verb: str) -> Any:
    return json.loads((folder / f"{verb}.json").read_text(encoding="utf-8"))


def made(panel: MakePanel, folder: Path, *names: str, log: str = "L.duckdb") -> Panel:
    with open_log(folder / log) as tape:
        return panel(choose(tape, results=[folder / f"{name}.json" for name in names]))


def table(panel: Panel, begins: str) -> Table:
    (found,) = [t for t in panel.tables if t.caption.startswith(begins)]
    return found


def column(of: Table, name: str) -> list[Any]:
    return [row[of.columns.index(name)] for row in of.rows]


@pytest.mark.parametrize("make", [policies_panel, equality_panel, proofs_panel, rules_panel])
def test_with_every_result_no_command_is_missing_that_was_run(make: MakePanel, folder: Path) -> None:
    panel = made(make, folder, *RESULTS)
    assert panel.tables
    commands = " ".join(missing.command for missing in panel.missing)
    assert not any(f"kvtape {verb}" in commands for verb in ("whatif", "replay", "curve", "eval", "calibrate"))
    assert all(t.rows for t in panel.tables)


def test_all_eight_panels_have_something_to_show_of_a_log_with_its_results(folder: Path) -> None:
    with open_log(folder / "L.duckdb") as tape:
        panels = make_panels(choose(tape, results=[folder / f"{name}.json" for name in RESULTS]))
    assert [panel.id for panel in panels][4:] == ["policies", "equality", "proofs", "rules"]
    assert len(panels) == 8
    assert all(panel.figures or panel.tables for panel in panels)


def test_trials_of_a_log_come_to_what_the_evaluation_printed(folder: Path) -> None:
    from_log = table(made(policies_panel, folder, log="E.duckdb"), "Evaluations")
    printed = table(made(policies_panel, folder, "eval"), "Evaluations")
    for name in ("policy", "budget (tokens)", "region", "n", "task"):
        assert column(from_log, name) == column(printed, name)
    for name in ("recall", "recall, low", "recall, high"):
        assert column(from_log, name) == pytest.approx(column(printed, name), abs=1e-6)


@pytest.mark.parametrize("make", [policies_panel, equality_panel, proofs_panel])
def test_without_results_a_panel_says_which_commands_make_them(make: MakePanel, folder: Path) -> None:
    panel = made(make, folder)
    assert panel.missing
    for missing in panel.missing:
        assert missing.command.startswith("kvtape ")
        assert "L.duckdb" in missing.command or any(verb in missing.command for verb in ("eval", "certify", "gate"))


def test_points_of_a_whatif_stand_there_with_their_intervals_and_bounds(folder: Path) -> None:
    panel, rows = made(policies_panel, folder, "whatif"), said(folder, "whatif")["rows"]
    shown = table(panel, "whatif.json, the whole log; costs")
    assert column(shown, "policy") == [r["policy"] for r in rows]
    assert column(shown, "on the front") == ["clairvoyant" if r["clairvoyant"] else r["pareto"] for r in rows]
    for r, interval in zip(rows, column(shown, "TTFT p95, 95 % (s)"), strict=True):
        ends = r["intervals"]["ttft_p95_ns"]
        told = "no turn has it" if ends is None else f"{ends['low'] / 1e9:.3g} to {ends['high'] / 1e9:.3g}"
        assert interval == told
    for r, computed, least in zip(
        rows, column(shown, "computed (tokens)"), column(shown, "fewest possible"), strict=True
    ):
        assert computed == r["prefilled_tokens"] + r["recomputed_tokens"]
        assert r["not_served"] or computed >= least
    for kept, most in zip(column(shown, "retained mass"), column(shown, "most possible"), strict=True):
        assert kept is None or kept <= most + 1e-9
    assert len([kept for kept in column(shown, "retained mass") if kept is not None]) == 4
    assert not [row for t in panel.tables for row in t.rows if str(row[0]).startswith("beyond a bound")]
    cost = next(f for f in panel.figures if f.id == "policies-1-cost")
    front = [p for p in rows if p["pareto"]]
    assert f"{len(front)} on the Pareto front" in cost.summary
    drawn = {name: s for s in cost.data["series"] if (name := s["name"])}
    assert len(drawn["the front"]["x"]) == len(front)
    assert drawn["stream"]["low"]
    assert all(
        low <= y <= high for s in drawn.values() for low, y, high in zip(s["low"], s["y"], s["high"], strict=False)
    )


def test_what_a_result_says_is_text_on_the_page_whatever_it_is(folder: Path) -> None:
    whatif, evil = said(folder, "whatif"), "</script><img src=x onerror=alert(1)>"
    whatif["rows"][0]["policy"] = evil
    (folder / "evil.json").write_text(json.dumps(whatif | {"assumed": [evil]}), encoding="utf-8")
    html = page([made(policies_panel, folder, "evil")], PageMeta("evil", evil))
    assert "<img" not in html
    assert html.count("</script>") == html.count("<script")
    assert "&lt;/script&gt;&lt;img" in html


def test_a_search_that_found_nothing_says_so(folder: Path) -> None:
    (rules,) = [
        t
        for t in made(policies_panel, folder, "tune").tables
        if t.caption.startswith("tune.json") and t.caption.endswith(": rules")
    ]
    assert dict(rules.rows)["search"].startswith("nothing that was tried meets not_served<=0 and peak_kv_bytes<=1; ")


def test_hit_rates_are_computed_where_none_were_given(folder: Path) -> None:
    given, own = made(policies_panel, folder, "curve"), made(policies_panel, folder)
    (a,), (b,) = ([f for f in panel.figures if f.id == "hit-rates-1"] for panel in (given, own))
    assert (a.title, b.title.startswith("Hit rate against budget: run ")) == (
        "Hit rate against budget: curve.json",
        True,
    )
    rates = {(r["policy"], r["budget_blocks"]): 100 * r["hit_rate"] for r in said(folder, "curve")["rows"]}
    assert {(s["name"], x): y for s in a.data["series"] for x, y in zip(s["x"], s["y"], strict=True)} == rates
    with open_log(folder / "L.duckdb") as log:
        assert f"({read_log(log).n_requests} in all)" in b.summary


def test_the_equality_table_has_what_the_replay_witnessed(folder: Path) -> None:
    panel, replay = made(equality_panel, folder, "replay"), said(folder, "replay")
    shown = table(panel, "replay.json: EQUAL; gate of each session: mean KL at most 0.01 nats")
    (backend,) = replay["backends"]
    row = dict(shown.rows)
    assert row["events that change residency"] == row["of these, memory read"] == backend["witness_positions"] > 0
    assert row["rows found"] == row["of these, identified"] == backend["witness_identities"]
    assert (row["logit checkpoints"], row["mean KL (nats)"]) == (backend["checkpoints"], backend["mean_kl"])
    assert table(panel, "replay.json: first divergence").rows == [("none", "no target parted anywhere")]
    assert table(panel, "replay.json: sessions").rows == [
        ("main", *[s["events"] for s in replay["sessions"]] * 2, "none lost")
    ]


def test_a_divergence_is_named_by_session_event_and_kind(folder: Path) -> None:
    with open_log(folder / "L.duckdb") as tape:
        evict = next(e for e in tape.events(tape.default_run().run_id, "main") if e.op == "evict")
    change = f"UPDATE events SET resident_digest = 7 WHERE seq = {evict.seq}"
    forged = edit_log(folder / "L.duckdb", folder / "forged.duckdb", [change], True)
    ran = kvtape("replay", forged, "--model", folder / "tiny.gguf", "--on", "llama", "--json")
    assert ran.code == 1
    (folder / "forged.json").write_text(ran.out, encoding="utf-8")
    panel = made(equality_panel, folder, "forged", log="forged.duckdb")
    assert table(panel, "forged.json: NOT EQUAL").rows
    first = dict(table(panel, "forged.json: first divergence").rows)
    where = (first["target"], first["session"], first["event (seq)"], first["operation"])
    assert where == ("log", "main", evict.seq, "evict")
    assert first["what"] == json.loads(ran.out)["first_divergence"]["what"]


def test_runs_in_one_log_are_compared_as_their_events_are(folder: Path) -> None:
    simulate = ("simulate", folder / "L.duckdb", "--costs", folder / "costs.json", "--log")
    assert kvtape(*simulate, folder / "same.duckdb").code == 0
    assert kvtape(*simulate, folder / "other.duckdb", "--policy", "stream:sink=4,recent=40", "--n-ctx", 128).code == 0
    logs = [folder / f"{name}.duckdb" for name in ("L", "same", "other")]
    assert kvtape("merge", *logs, "--out", folder / "all.duckdb").code == 0
    panel = made(equality_panel, folder, log="all.duckdb")
    pairs = table(panel, "Runs of this log")
    with open_log(folder / "all.duckdb") as tape:
        runs = [run.run_id for run in tape.runs()]
        first, *others = (tape.events(run, "main") for run in runs)
    assert column(pairs, "beside") == runs[1:]
    differ = [first_difference(first, other) for other in others]
    assert [verdict == "equal" for verdict in column(pairs, "verdict")] == [d is None for d in differ]
    assert sorted(column(pairs, "verdict")) == ["different", "equal"]
    for seq, difference in zip(column(pairs, "at event (seq)"), differ, strict=True):
        at = None if difference is None else int(difference.split(":")[0].rsplit(" ", 1)[1])
        held = [
            e.seq for e in first if e.op in ("truncate", "prefill", "decode", "evict", "admit", "shift", "recompute")
        ]
        assert seq == ("nowhere" if at is None else held[at])
    costs = {name: values for name, *values in table(made(policies_panel, folder, log="all.duckdb"), "Runs of").rows}
    alone, *of_two = sorted(costs["on the front of its like"])
    assert alone == "alone"
    assert "yes, of 2" in of_two  # of two one always is; whether both are is a matter of the times that were learnt
    assert all(c >= least for c, least in zip(costs["computed (tokens)"], costs["fewest possible"], strict=True))


def test_what_the_gate_printed_stands_there(folder: Path) -> None:
    rows = [body_of(row) for row in shipped_rows() if row.kind == "gate"]
    gate = {"schema": "kvtape.gate/1", "engine": "llama", "engine_version": "1", "machine": "m", "margin": 0.05}
    (folder / "gate.json").write_text(json.dumps(gate | {"rows": rows}), encoding="utf-8")
    shown = table(made(proofs_panel, folder, "gate"), "The gate on llama, 1, on m (gate.json)")
    assert column(shown, "verdict") == [row["verdict"] for row in rows]
    saved = [percent(row["cpu"]) + ("*" if row["decided_by"] == "cpu" else "") for row in rows if row["cpu"]]
    assert [cell for cell in column(shown, "CPU time saved") if cell != "not measured"] == saved


def test_fidelity_is_that_of_the_cost_model(folder: Path) -> None:
    fits = table(made(proofs_panel, folder, "costs"), "How the costs of costs.json hold")
    kinds = {kind: known["fit"] for kind, known in said(folder, "costs")["kinds"].items() if known["fit"]}
    assert column(fits, "operation") == list(kinds)
    assert column(fits, "events") == [fit["events"] for fit in kinds.values()]


def test_rules_name_digests_versions_seed_and_how_to_do_it_again(folder: Path) -> None:
    panel = made(rules_panel, folder, "replay")
    log = dict(table(panel, "The log").rows)
    with open_log(folder / "L.duckdb") as tape:
        assert log["chain digest"] == tape.chain_digest
        logical = tape.logical_digest()
    assert log["state"] == "sealed; it is what was written"
    run = dict(table(panel, "Runs").rows)
    assert (run["seed"], run["logical digest"]) == ("nothing is drawn", logical)
    assert run["made by"].startswith("kvtape record --model tiny.gguf --backend llama --policy")
    again = dict(table(panel, "How to do it again").rows)
    assert again["this report"] == "kvtape report L.duckdb --with replay.json --out report.html"
    assert {"python", "kvtape", "duckdb"} <= {name for name, _ in table(panel, "Versions").rows}


def test_a_log_that_was_changed_says_so(folder: Path) -> None:
    edit_log(folder / "L.duckdb", folder / "changed.duckdb", ["UPDATE events SET reason = 'no' WHERE seq = 1"], False)
    panel = made(rules_panel, folder, log="changed.duckdb")
    assert "NOT what was written" in dict(table(panel, "The log").rows)["state"]
    assert table(panel, "What does not hold").rows
