"""`kvtape record --score-all`: dense attention of the whole tape in the log, and every command over such a log."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.errors import Cancelled
from kvtape.backends.shadow import Shadow
from kvtape.planner.events import Event, Op
from kvtape.replay.invariants import capability_findings, plan_findings
from kvtape.sim.costs.samples import samples_of
from kvtape.sim.errors import NoAttention
from kvtape.sim.fidelity import compare
from kvtape.sim.quality.attention import AttentionMap
from kvtape.sim.quality.attention_log import read_attention
from kvtape.sim.world.reading import read_scripts
from kvtape.traces.reader import open_log
from support.command import Ran, kvtape
from support.recorded import TEXT, record
from support.tiny_gguf import write_tiny

CHAT = [("system", "Be brief. " * 6), ("user", TEXT[:160]), ("assistant", "Yes."), ("user", TEXT[40:200])]
H2O = "h2o:budget=96,recent=24,block=16"


def chat(model: Path, log: Path, *options: object) -> Ran:
    """Two turns; the given answer takes the place of the generated one, so the tape is cut and grows again."""
    source = log.with_suffix(".jsonl")
    source.write_text("\n".join(json.dumps({"role": r, "content": c}) for r, c in CHAT), encoding="utf-8")
    where = ["--model", model, "--chat", source, "--log", log, "--backend", "llama:scores=on", "--content"]
    return kvtape("record", *where, "--n-ctx", 256, "--chunk", 64, "--decode", 20, "--policy", H2O, *options)


@pytest.fixture(scope="module")
def scored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = tmp_path_factory.mktemp("scored") / "scored.duckdb"
    ran = chat(model, log, "--score-all", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["dense_pieces"] > 10
    return log


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    log = tmp_path_factory.mktemp("alone") / "alone.duckdb"
    ran = chat(model, log)
    assert ran.code == 0, ran.err
    return log


def events_of(log: Path) -> list[Event]:
    with open_log(log) as tape:
        return tape.events(tape.default_run().run_id, "main")


def map_in(log: Path | str) -> AttentionMap:
    with open_log(log) as tape:
        return read_attention(tape)["main"]


def what_happened(events: Sequence[Event]) -> list[dict[str, object]]:
    """All columns but times and numbers, without the dense pass."""
    left_out = {"run_id", "seq", "at_ns", "elapsed_ns"}
    own = [e for e in events if e.reason != "dense"]
    return [{k: v for k, v in asdict(e).items() if k not in left_out} for e in own]


def test_what_the_session_did_is_the_same_without_it(scored: Path, alone: Path) -> None:
    assert what_happened(events_of(scored)) == what_happened(events_of(alone))


def test_every_query_of_both_turns_is_measured(scored: Path) -> None:
    found = map_in(scored)
    with open_log(scored) as tape:
        run = tape.default_run().run_id
        lengths = dict(
            tape.sql("SELECT turn, max(stop) FROM events WHERE op IN ('prefill', 'decode') GROUP BY turn")[1]
        )
        state = tape.state_at(run, "main")
    assert sorted(lengths) == [1, 2]
    assert lengths[2] == state.tape_length > state.resident_tokens
    for turn, length in lengths.items():
        assert found.path(turn, length).complete
    assert min(p.start for p in found.pieces if p.turn == 2) < lengths[1]  # cut, and grown again


def test_verify_replay_and_the_contract_take_such_a_log(scored: Path, model: Path) -> None:
    assert kvtape("verify", scored).code == 0
    ran = kvtape("replay", scored, "--on", "llama", "--model", model, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["equal"]
    with open_log(scored) as tape:
        run = tape.default_run().run_id
        events = tape.events(run, "main")
        assert not capability_findings(tape.session(run, "main"), events)
        assert not plan_findings(events, tape.plans(run, "main"))


def test_a_session_without_scores_of_its_own_may_have_dense_ones(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.duckdb"
    assert record(model, log, "--score-all", "--score-every", 64).code == 0
    with open_log(log) as tape:
        run = tape.default_run().run_id
        assert not capability_findings(tape.session(run, "main"), tape.events(run, "main"))
        assert tape.sql("SELECT count(*) FROM scored")[1] == [(0,)]
    found = map_in(log)
    assert max(p.n_queries for p in found.pieces) == 64
    assert len(found.pieces) < 12


def test_copies_of_the_log_have_the_same_map(scored: Path, tmp_path: Path) -> None:
    redacted, merged, folder = tmp_path / "redacted.duckdb", tmp_path / "merged.duckdb", tmp_path / "parquet"
    assert kvtape("redact", scored, "--out", redacted).code == 0
    assert kvtape("merge", scored, "--out", merged).code == 0
    assert kvtape("merge", scored, "--parquet", "--out", folder).code == 0
    wanted = map_in(scored)
    for copy in (redacted, merged, f"parquet://{folder}"):
        found = map_in(copy)
        assert found.layers == wanted.layers
        for got, want in zip(found.pieces, wanted.pieces, strict=True):
            assert (got.start, got.stop, got.turn, got.seq) == (want.start, want.stop, want.turn, want.seq)
            np.testing.assert_array_equal(got.stops, want.stops)
            np.testing.assert_array_equal(got.mass, want.mass)
            np.testing.assert_array_equal(got.peak, want.peak)
    assert kvtape("verify", redacted).code == kvtape("verify", merged).code == 0


def test_views_tell_the_sessions_scores_from_the_dense_ones(scored: Path, alone: Path) -> None:
    query = "SELECT turn, kind, block_id, start, stop, given_up, policy FROM scored ORDER BY ALL"
    with open_log(scored) as beside, open_log(alone) as without:
        rows = beside.sql(query)[1]
        assert rows == without.sql(query)[1]
        assert any(row[5] for row in rows)
        shares = beside.sql("SELECT seq, sum(share), max(stop), max(query_stop) FROM attention GROUP BY seq")[1]
        assert without.sql("SELECT count(*) FROM attention")[1] == [(0,)]
        costs = "SELECT op, way, events FROM costs ORDER BY ALL"
        assert beside.sql(costs)[1] == without.sql(costs)[1]
    assert len(shares) == len(map_in(scored).pieces)
    for _, share, stop, query_stop in shares:
        assert share == pytest.approx(1)
        assert stop == query_stop


def test_the_simulator_reads_the_same_session(scored: Path, alone: Path) -> None:
    with open_log(scored) as beside, open_log(alone) as without:
        one, other = (read_scripts(tape)[0] for tape in (beside, without))
    for a, b in zip(one.turns, other.turns, strict=True):
        assert (a.number, a.tape) == (b.number, b.tape)
        assert [(s.kind, s.n, s.at, s.tokens, s.stretches) for s in a.steps] == [
            (s.kind, s.n, s.at, s.tokens, s.stretches) for s in b.steps
        ]
    assert (one.ended, one.skipped) == (other.ended, other.skipped)


def test_costs_are_learnt_as_if_nothing_had_run_beside(scored: Path) -> None:
    events = events_of(scored)
    own = [e for e in events if e.reason != "dense"]
    assert len(own) < len(events)
    assert list(samples_of(events)) == list(samples_of(own))
    assert all(e.elapsed_ns is None for e in events if e.reason == "dense")


def test_fidelity_compares_the_sessions_own_events(scored: Path, alone: Path) -> None:
    beside, without = events_of(scored), events_of(alone)
    found = compare(beside, without, without)
    assert found.difference is None
    timed = {str(e.op) for e in without if e.elapsed_ns is not None and e.op not in (Op.PLAN, Op.GENERATE)}
    assert set(found.operation) == timed >= {"prefill", "decode", "evict", "score"}
    assert compare(without, beside, without).operation.keys() == timed


def test_a_log_without_it_names_the_remedy(alone: Path) -> None:
    with pytest.raises(NoAttention, match="record it with `kvtape record --score-all`"):
        map_in(alone)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--score-every", "8"], "give both"),
        (["--score-all", "--score-every", "0"], "--score-every"),
        (["--score-all", "--decode", "4000"], "was trained on 4096"),
        (["--score-all", "--memory", "6GiB"], "give --n-ctx instead"),
    ],
)
def test_what_cannot_be_measured_is_refused_and_leaves_no_log(
    model: Path, tmp_path: Path, options: list[str], words: str
) -> None:
    log = tmp_path / "a.duckdb"
    ran = record(model, log, *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert words in ran.err
    assert not list(tmp_path.glob("a.duckdb*"))


def test_a_model_that_has_no_attention_to_show_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "a.duckdb"
    ran = record(write_tiny(tmp_path / "mamba.gguf", "mamba"), log, "--score-all", "--policy", "none", "--n-ctx", 1024)
    assert ran.code == 2
    assert "dense attention" in ran.err
    assert "leave out --score-all" in ran.err
    assert not list(tmp_path.glob("a.duckdb*"))


def test_what_was_given_up_is_said_and_the_recording_is_whole(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Shadow._measure

    def fail_behind_100(self: Shadow, parts: object, start: int, *args: object, **rest: object) -> None:
        if start > 100:
            raise RuntimeError("the second cache is gone")
        measure(self, parts, start, *args, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Shadow, "_measure", fail_behind_100)
    log = tmp_path / "a.duckdb"
    ran = record(model, log, "--score-all")
    assert ran.code == 1
    assert ran.err.count("the second cache is gone") == 1
    assert kvtape("verify", log).code == 0
    with open_log(log) as tape:
        assert tape.state_at(tape.default_run().run_id, "main").closed
    with pytest.raises(NoAttention, match="the second cache is gone"):
        map_in(log)


def test_ctrl_c_while_the_last_queries_are_measured(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*args: object, **rest: object) -> None:
        raise Cancelled("cancelled")

    monkeypatch.setattr(Shadow, "_measure", cancelled)
    log = tmp_path / "a.duckdb"
    ran = record(model, log, "--score-all")
    assert ran.code == 130
    assert "interrupted" in ran.err
    assert events_of(log)[-1].op is Op.CLOSE
    with pytest.raises(NoAttention):
        map_in(log)
