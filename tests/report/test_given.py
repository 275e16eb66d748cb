"""Results that a report is given: read by their schema, whole or not at all, and of this log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.errors import UsageError
from kvtape.backends.proofs.store import shipped_rows
from kvtape.eval.certification.report import rows_body
from kvtape.eval.gate.report import body_of
from kvtape.report.given.reading import Subject, read_given
from kvtape.report.given.shapes import Certification, Fidelity, Gate
from kvtape.sim.fidelity import compare

SUBJECT = Subject("log.duckdb", frozenset({"a" * 64}), frozenset({"llama/0"}))
ANY = Subject("log.duckdb", frozenset({"a" * 64}), frozenset())
REPLAY: dict[str, Any] = {
    "schema": "kvtape.replay/1",
    "equal": True,
    "first_divergence": None,
    "backends": [],
    "sessions": [],
    "notes": [],
    "tolerances": {},
    "log_digest": "a" * 64,
    "config_digest": "b" * 64,
    "model_fingerprint": None,
    "seed": None,
}


def written(folder: Path, value: Any, name: str = "r.json") -> Path:
    path = folder / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("not json", "no JSON; a report takes what kvtape replay"),
        (json.dumps(REPLAY).replace("true", "NaN"), "no JSON; "),
        ([1], "no result of kvtape; it takes"),
        ({"rows": []}, "no result of kvtape; it takes"),
        ({"schema": "kvtape.show/1"}, "schema 'kvtape.show/1' is not for a report; it takes"),
        ({"schema": ["kvtape.replay/1"]}, "no result of kvtape"),
        (REPLAY | {"equal": "yes"}, "not a whole kvtape.replay/1 (equal: "),
        ({k: v for k, v in REPLAY.items() if k != "backends"}, "(backends: "),
        (REPLAY | {"log_digest": "c" * 64}, "a result of another log (digest cccccccccccc), not of log.duckdb"),
        ({"schema": "kvtape.certify/1", "rows": 3}, "not a whole kvtape.certify/1"),
        ({"schema": "kvtape.costs/2"}, "r.json"),
    ],
)
def test_what_is_no_result_of_this_log_is_refused_by_name(value: Any, said: str, tmp_path: Path) -> None:
    path = written(tmp_path, value)
    with pytest.raises(UsageError) as refused:
        read_given([path], SUBJECT)
    assert str(refused.value).startswith(str(path))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        read_given([tmp_path / "none.json"], SUBJECT)


def test_of_a_folder_what_is_something_else_is_left_out_and_said(tmp_path: Path) -> None:
    written(tmp_path, REPLAY, "b.json")
    written(tmp_path, REPLAY | {"log_digest": "c" * 64}, "a.json")
    written(tmp_path, {}, "c.json")
    found = read_given([tmp_path, tmp_path / "b.json"], SUBJECT)
    assert [named.name for named in found.results] == ["b.json"]
    assert found.left_out == (
        "a.json: a result of another log (digest cccccccccccc), not of log.duckdb",
        "c.json: no result of kvtape",
    )


def test_of_a_folder_a_damaged_result_is_refused_all_the_same(tmp_path: Path) -> None:
    written(tmp_path, REPLAY | {"backends": None})
    with pytest.raises(UsageError, match="not a whole"):
        read_given([tmp_path], SUBJECT)


def test_more_keys_than_are_known_are_let_pass(tmp_path: Path) -> None:
    (found,) = read_given([written(tmp_path, REPLAY | {"new": 1})], SUBJECT).results
    assert found.value.equal is True


def test_rows_of_certify_and_gate_come_back_as_they_were(tmp_path: Path) -> None:
    certified = [row for row in shipped_rows() if row.kind == "certification"]
    gated = [row for row in shipped_rows() if row.kind == "gate"]
    common = {"engine": "llama", "engine_version": "1", "machine": "m"}
    said = common | {"schema": "kvtape.certify/1", "rows": rows_body(certified)}
    gate = common | {"schema": "kvtape.gate/1", "margin": 0.05, "rows": [body_of(row) for row in gated]}
    found = read_given([written(tmp_path, said), written(tmp_path, gate, "g.json")], ANY)
    assert found.of(Certification)[0].value.rows == tuple(certified)
    assert [row.verdict for row in found.of(Gate)[0].value.rows] == [body_of(row)["verdict"] for row in gated]
    with pytest.raises(UsageError, match="a result of another model"):
        read_given([tmp_path / "r.json"], SUBJECT)


def test_the_table_of_make_fidelity_is_read(tmp_path: Path) -> None:
    case = compare([], [], []).to_json()
    path = written(tmp_path, {"schema": "kvtape.fidelity/1", "clock": "cpu", "engines": {"llama": {"B": case}}})
    (found,) = read_given([path], SUBJECT).of(Fidelity)
    assert found.value.engines["llama"]["B"].allowed == 0.05
