"""`kvtape explain` on logs that a real engine recorded, and on simulated ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtape.planner.events import Op
from kvtape.planner.ranges import RangeSet
from kvtape.traces.reader import open_log
from support.command import kvtape
from support.forge import edit_log
from support.recorded import record


def said(*args: object, code: int = 0) -> dict[str, Any]:
    ran = kvtape("explain", *args, "--json")
    assert ran.code == code, ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


def plans_of(log: Path) -> list[int]:
    with open_log(log) as tape:
        return sorted(tape.plans(tape.default_run().run_id, "main"))


def test_every_decision_of_an_engine_s_log_comes_out_again(log: Path) -> None:
    plans = plans_of(log)
    assert plans
    for seq in plans:
        body = said(log, seq)
        decision = body["decision"]
        assert decision["rederived"] == "equal"
        assert sum(b["stop"] - b["start"] for b in decision["blocks"]) == decision["total_tokens"]
        gone = RangeSet((a, b) for _, a, b in decision["evict"])
        assert gone.n_tokens == decision["freed_tokens"]
        assert gone | RangeSet((a, b) for a, b in decision["keep"]) == RangeSet((a, b) for a, b in body["resident"])
        assert [a["policy"] for a in body["alternatives"]] == ["none", "class:budget=256"]
        assert sum(o["tokens"] for o in body["hindsight"] if o["what"] != "forgotten") <= gone.n_tokens


def test_a_scored_log_is_explained_with_its_scores(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "scored.duckdb"
    ran = record(model, log, "--policy", "snapkv:budget=200,window=16", "--backend", "llama:scores=on")
    assert ran.code == 0, ran.err
    for seq in plans_of(log):
        body = said(log, seq, "--policy", "snapkv:budget=150,window=16", "--policy", "h2o:budget=200,recent=60")
        decision = body["decision"]
        assert (decision["rederived"], decision["ranked_by"]) == ("equal", "score")
        went = [b for b in decision["blocks"] if b["fate"] == "evicted"]
        assert max(b["score_high"] for b in went) == decision["threshold"]
        assert {b["rank"] for b in went} == set(range(1, len(went) + 1))
        less, other = body["alternatives"]
        assert less["evicted_tokens"] > decision["freed_tokens"]
        assert less["keeps_only"] == []
        assert "accumulated" in other["error"]


def test_an_evict_leads_to_its_plan_and_a_prefill_to_its_reason(log: Path) -> None:
    with open_log(log) as tape:
        events = tape.events(tape.default_run().run_id, "main")
    evict = next(e for e in events if e.op == Op.EVICT)
    assert said(log, evict.seq)["plan_seq"] == max(s for s in plans_of(log) if s < evict.seq)
    prefill = next(e for e in events if e.op == Op.PREFILL)
    body = said(log, prefill.seq)
    assert body["why_computed"]["reason"] == "cold"
    assert body["computed"]["new"] == [[prefill.start, prefill.stop]]
    assert body["decision"] is None


def test_what_a_person_reads(log: Path) -> None:
    seq = plans_of(log)[0]
    ran = kvtape("explain", log, seq, "--policy", "h2o:budget=200,recent=60")
    assert ran.code == 0, ran.err
    for words in ("comes out again\tyes", "recent span", "# what other policies would have done", "took no scores"):
        assert words in ran.out
    assert "# what became of what went" in ran.out


def test_a_run_is_named_by_the_beginning_of_its_id(log: Path) -> None:
    seq = plans_of(log)[0]
    with open_log(log) as tape:
        run = tape.default_run().run_id
    assert said(log, run[:6], seq) == said(log, seq) == said(log, run, seq, "--session", "main")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["x"], "SEQ 'x'"),
        (["-1"], "-1"),
        (["99999"], "no event 99999"),
        (["a", "b", "4"], "give [RUN] SEQ"),
        (["other-run", "4"], "no such run; the log has: live-"),
        (["4", "--session", "nobody"], "no session 'nobody'"),
        (["4", "--policy", "lru:budget=4"], "unknown policy"),
    ],
)
def test_what_cannot_be_explained_is_one_line(log: Path, args: list[str], words: str) -> None:
    ran = kvtape("explain", log, *args)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err


def test_a_plan_that_does_not_follow_is_a_finding(log: Path, tmp_path: Path) -> None:
    seq = plans_of(log)[0]
    statement = f"UPDATE plans SET protected_tokens = protected_tokens + 1 WHERE seq = {seq}"
    forged = edit_log(log, tmp_path / "forged.duckdb", [statement], rechain=True)
    body = said(forged, seq, code=1)
    assert body["decision"]["rederived"] == "differs"
    assert "protected" in body["decision"]["rederived_why"]
