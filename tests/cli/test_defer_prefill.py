"""`kvtape record --defer-prefill`: what it writes, and that every other verb reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.proofs.gates import gate_subject
from kvtape.backends.proofs.machine import speed_class
from kvtape.backends.proofs.rows import ProofRow
from kvtape.backends.proofs.store import PROOFS_VARIABLE, add_rows
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.registry import open_engine
from kvtape.traces.reader import open_log
from support.command import Ran, kvtape

pytestmark = pytest.mark.contract("I6")

Record = Callable[..., Ran]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "chat.jsonl"
    said = [("system", "You keep promises."), *(("user", f"What of promise {i}?") for i in range(3))]
    path.write_text("".join(json.dumps({"role": r, "content": c}) + "\n" for r, c in said), encoding="utf-8")
    return path


@pytest.fixture
def record(model: Path, chat: Path) -> Record:
    def run(log: Path, *more: object) -> Ran:
        options = ["--n-ctx", 128, "--chunk", 32, "--decode", 6, "--policy", "stream:sink=4,recent=40", "--content"]
        return kvtape("record", "--model", model, "--chat", chat, "--log", log, *options, "--json", *more)

    return run


def told(ran: Ran) -> dict[str, Any]:
    assert ran.code == 0, ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


def test_the_same_is_said_and_kept_and_every_verb_reads_the_log(record: Record, model: Path, tmp_path: Path) -> None:
    eager = told(record(tmp_path / "eager.duckdb"))
    log = tmp_path / "deferred.duckdb"
    deferred = told(record(log, "--defer-prefill", "on"))
    assert (deferred["deferred_prefill_calls"], "deferred_prefill_calls" in eager) == (3, False)
    assert deferred["run_id"] != eager["run_id"]
    for name in ("said", "tape_tokens", "resident_tokens", "evicted_tokens"):
        assert deferred[name] == eager[name], name
    assert kvtape("verify", log).code == 0
    assert kvtape("show", log, "--at", 3).code == 0
    again = tmp_path / "again.duckdb"
    told(record(again, "--defer-prefill", "on"))
    assert kvtape("diff", log, again).code == 0
    ran = kvtape("replay", log, "--on", "llama", "--on", "openvino", "--model", model, "--json")
    assert told(ran)["equal"]
    turns = told(
        kvtape(
            "sql",
            log,
            "SELECT turn, deferred_prefill_calls AS c, decode_ns > 0 AS d FROM turns ORDER BY turn",
            "--json",
        )
    )
    assert turns["rows"] == [{"turn": i, "c": 1, "d": True} for i in (1, 2, 3)]
    why = told(kvtape("sql", log, "SELECT turn, reason FROM why_prefilled ORDER BY seq", "--json"))
    assert why["rows"][0] == {"turn": 1, "reason": "cold"}


def test_it_is_calibrated_and_simulated(record: Record, tmp_path: Path) -> None:
    log, costs, out = tmp_path / "log.duckdb", tmp_path / "costs.json", tmp_path / "simulated.duckdb"
    told(record(log, "--defer-prefill", "on"))
    told(kvtape("calibrate", log, "--out", costs, "--json"))
    told(kvtape("simulate", log, "--costs", costs, "--log", out, "--json"))
    with open_log(log) as live, open_log(out) as simulated:
        one, other = (
            [
                (e.op, e.start, e.stop, e.layout_digest, e.deferred_prefill_tokens)
                for e in t.events(t.default_run().run_id, "main")
                if e.layout_digest is not None
            ]
            for t in (live, simulated)
        )
    assert one == other


def test_auto_takes_it_where_a_row_of_the_gate_lets_it_through(
    record: Record, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROOFS_VARIABLE, str(tmp_path / "proofs.json"))
    ran = record(tmp_path / "off.duckdb", "--defer-prefill", "auto")
    assert "deferred_prefill_calls" not in told(ran)
    assert "no row of the gate" in ran.err
    engine = open_engine("llama", model, {})
    facts, version = engine.facts, engine.version
    engine.close()
    for verdict in ("fail", "pass"):
        row = ProofRow(
            kind="gate",
            model=model.name,
            fingerprint=facts.fingerprint,
            engine="llama",
            engine_version=version,
            machine=speed_class(),
            day=datetime(2026, 1, 2 if verdict == "pass" else 1, tzinfo=UTC).date().isoformat(),
            subject=gate_subject("deferred-prefill", "chat", "llama", SessionConfig()),
            settings="planted",
            verdict=verdict,
        )
        add_rows([row])
        said = told(record(tmp_path / f"{verdict}.duckdb", "--defer-prefill", "auto"))
        assert ("deferred_prefill_calls" in said) == (verdict == "pass")


def test_a_choice_that_is_none_is_refused_before_anything_is_written(record: Record, tmp_path: Path) -> None:
    ran = record(tmp_path / "a.duckdb", "--defer-prefill", "maybe")
    assert ran.code == 2
    assert "choose on, off or auto" in ran.err
    assert not (tmp_path / "a.duckdb").exists()
