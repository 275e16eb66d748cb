"""`kvtape doctor --contract`: states from logs and from a test run, and from nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtape.cli.contract import contract_report
from kvtape.replay import evidence
from kvtape.replay.evidence import INVARIANTS, REQUIRED, Tally, read_evidence, sources_digest, write_evidence
from kvtape.testing.evidence import EvidenceRecorder
from support.command import kvtape
from support.forge import edit_log
from support.recorded import record
from support.repository import ROOT


def asked(*args: object) -> tuple[int, dict[str, Any]]:
    ran = kvtape("doctor", "--contract", "--json", *args)
    assert ran.out, ran.err
    return ran.code, json.loads(ran.out)["invariants"]


def test_run(path: Path, **outcomes: str) -> Path:
    """Evidence as a whole test run writes it; `outcomes` by invariant, passed where none is given."""
    tests = [
        {
            "id": f"tests/x/{name}::test_it",
            "invariant": inv,
            "outcome": outcomes.get(inv, "passed"),
            "cell": inv == "I1",
        }
        for inv, names in REQUIRED.items()
        for name in names
    ]
    write_evidence(path, tests, {})
    return path


test_run.__test__ = False  # type: ignore[attr-defined]


def states(told: dict[str, Any]) -> dict[str, str]:
    return {name: told[name]["state"] for name in INVARIANTS}


PROVEN = dict.fromkeys(INVARIANTS, "holds")


def test_without_a_log_and_a_test_run_nothing_is_proven() -> None:
    code, told = asked()
    assert (code, set(states(told).values())) == (0, {"unproven"})
    assert all(told[name]["evidence"]["why_unproven"] for name in INVARIANTS)


def test_a_sound_log_alone_proves_nothing_and_says_how_many_rows_were_asked(log: Path) -> None:
    code, told = asked(log)
    assert (code, set(states(told).values())) == (0, {"unproven"})
    assert told["I4"]["evidence"]["rows"] > 10
    assert told["I3"]["evidence"]["rows"] > 0


@pytest.mark.parametrize("backend", ["llama", "openvino"])
def test_with_a_test_run_of_these_sources_it_holds_over_a_real_log_of_each_engine(
    backend: str, model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "a.duckdb"
    assert record(model, log, "--backend", backend).code == 0
    code, told = asked(log, "--evidence", test_run(tmp_path / "e.json"))
    assert (code, states(told)) == (0, PROVEN)
    assert told["I1"]["evidence"]["tests"]["cells"] == len(REQUIRED["I1"])


@pytest.mark.contract("I5")
def test_sessions_that_said_uncertified_are_counted_and_break_nothing(log: Path, model: Path, tmp_path: Path) -> None:
    owned = tmp_path / "owned.duckdb"
    asked_for = ("--backend", "llama", "--kv-type", "bf16", "--policy", "none", "--n-ctx", 512, "--uncertified")
    assert record(model, owned, *asked_for).code == 0
    for logs, count in (((log,), 0), ((log, owned), 1), ((owned,), 1)):
        _, told = asked(*logs)
        assert told["I5"]["evidence"]["uncertified_sessions"] == count
        assert told["I5"]["evidence"]["broken_rows"] == 0
        assert "uncertified_sessions" not in told["I6"]["evidence"]
        line = f"uncertified: {count} of {len(logs)} sessions ran on a precision that nothing certified"
        assert line in kvtape("doctor", "--contract", *logs).out
    assert "uncertified:" not in kvtape("doctor", "--contract").out


@pytest.mark.parametrize(
    ("statement", "invariant", "what"),
    [
        ("UPDATE events SET reused = 7 WHERE reused IS NOT NULL", "I4", "prefix: reused 7 +"),
        ("UPDATE events SET token_count_source = 'guess' WHERE op = 'decode'", "I4", "source: counted by guess"),
        ("UPDATE plans SET evict = '[]'", "I3", "was evicted behind it"),
        ("UPDATE sessions SET capabilities = '{\"remove_middle\": false}'", "I2", "although remove_middle is false"),
        ("UPDATE events SET op = 'fatal' WHERE op = 'generate'", "I1", "behind the fatal of seq"),
        ("UPDATE sessions SET kv_type_k = 'q8_0'", "I5", "opened with k=q8_0,v=f16,fa=off, which is no base precision"),
        ("UPDATE sessions SET flash_attention = true", "I5", "fa=on, which is no base precision, and says neither"),
        ("UPDATE events SET detail = '{\"deferred\":true}' WHERE op = 'prompt'", "I6", "did not ask for it"),
        ("UPDATE events SET deferred_prefill_tokens = 3 WHERE op = 'prefill'", "I6", "3 deferred tokens on a prefill"),
        (
            "UPDATE events SET drafted_tokens = 2, accepted_tokens = 2, rejected_tokens = 0 WHERE op = 'decode'",
            "I7",
            "decode was speculated, although the session did not ask for it",
        ),
        ("UPDATE events SET rejected_tokens = 1 WHERE op = 'decode'", "I7", "drafted None is not accepted None"),
    ],
)
def test_a_forged_row_makes_its_invariant_fail_and_is_named(
    log: Path, tmp_path: Path, statement: str, invariant: str, what: str
) -> None:
    forged = edit_log(log, tmp_path / "forged.duckdb", [statement], rechain=True)
    code, told = asked(forged, "--evidence", test_run(tmp_path / "e.json"))
    assert (code, told[invariant]["state"]) == (1, "fails")
    evidence = told[invariant]["evidence"]
    assert evidence["broken_rows"] == len(evidence["findings"]) or len(evidence["findings"]) == 20
    assert any(f.startswith("forged.duckdb live-") and " seq " in f and what in f for f in evidence["findings"])
    if invariant == "I4":
        assert states(told) == PROVEN | {"I4": "fails"}


def test_a_failed_test_makes_its_invariant_fail(tmp_path: Path) -> None:
    code, told = asked("--evidence", test_run(tmp_path / "e.json", I3="failed"))
    assert (code, states(told)) == (1, PROVEN | {"I3": "fails"})
    assert told["I3"]["evidence"]["tests"]["failures"] == ["tests/x/test_parity.py::test_it"]
    shown = kvtape("doctor", "--contract", "--evidence", tmp_path / "e.json")
    assert "tests/x/test_parity.py::test_it" in shown.out


@pytest.mark.parametrize("invariant", REQUIRED)
def test_every_invariant_fails_with_its_tests_and_is_unproven_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invariant: str
) -> None:
    monkeypatch.setattr(evidence, "sources_digest", lambda: "these")

    def state(path: Path) -> dict[str, str]:
        return states(contract_report([], path)["invariants"])

    others = {name: s for name, s in PROVEN.items() if name != invariant}
    path = test_run(tmp_path / "e.json", **{invariant: "failed"})
    assert state(path) == others | {invariant: "fails"}
    body = json.loads(path.read_text())
    for tests in ([t for t in body["tests"] if t["invariant"] != invariant], []):
        path.write_text(json.dumps(body | {"tests": tests}))
        assert state(path)[invariant] == "unproven"
    for name in REQUIRED[invariant]:
        test_run(path)
        body = json.loads(path.read_text())
        left = [t for t in body["tests"] if t["invariant"] != invariant or f"/{name}::" not in t["id"]]
        assert len(left) == len(body["tests"]) - 1
        path.write_text(json.dumps(body | {"tests": left}))
        assert state(path) == others | {invariant: "unproven"}


def test_every_invariant_has_tests_that_it_cannot_do_without() -> None:
    assert set(REQUIRED) == set(INVARIANTS)
    assert all(REQUIRED.values())


@pytest.mark.parametrize("column", ["sources", "kvtape_version"])
def test_a_test_run_of_other_sources_does_not_count(tmp_path: Path, column: str) -> None:
    path = test_run(tmp_path / "e.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {column: "0"}))
    code, told = asked("--evidence", path)
    assert (code, set(states(told).values())) == (0, {"unproven"})
    assert "does not count" in told["I1"]["evidence"]["why_unproven"][0]


def test_a_test_run_that_left_something_out_is_no_proof(tmp_path: Path) -> None:
    path = test_run(tmp_path / "e.json")
    body = json.loads(path.read_text())
    body["tests"] = [t for t in body["tests"] if "test_slots.py" not in t["id"]]
    body["deselected"] = {"I4": 3}
    path.write_text(json.dumps(body))
    _, told = asked("--evidence", path)
    assert states(told) == PROVEN | {"I1": "unproven", "I4": "unproven"}
    assert told["I1"]["evidence"]["why_unproven"] == ["the test run lacks test_slots.py"]
    assert told["I4"]["evidence"]["why_unproven"] == ["the test run lacks 3 deselected tests"]


def test_every_required_file_is_there_and_marked() -> None:
    for invariant, names in REQUIRED.items():
        for name in names:
            (path,) = (ROOT / "tests").rglob(name)
            assert f'pytest.mark.contract("{invariant}"' in path.read_text(encoding="utf-8"), path


def test_pytest_writes_what_ran_and_what_was_left_out(tmp_path: Path) -> None:
    path, before = tmp_path / "e.json", sources_digest()
    where = "tests/replay/test_identities.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", where, "-k", "label or held"]
    done = subprocess.run(
        [*command, "--kvtape-evidence", str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    ran = read_evidence(path)
    assert ran.sources in (before, sources_digest())  # a checkout that somebody works in may change meanwhile
    assert [t["id"].partition("::")[2] for t in ran.tests] == [
        "test_a_backend_that_cannot_count_is_labelled",
        "test_every_identity_was_held_against_a_row",
    ]
    assert ran.deselected["I4"] >= 10
    assert ran.count("I4").passed == 2


@pytest.mark.parametrize(
    "text", ["", "[]", "[" * 10**5, "\udcff", '{"schema": "other/1"}', '{"schema": "kvtape-evidence/1"}']
)
def test_a_file_that_is_no_evidence_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    ran = kvtape("doctor", "--contract", "--evidence", path)
    assert (ran.code, "e.json: no evidence of a test run" in ran.err) == (2, True)
    for other in (tmp_path / "none.json", tmp_path):
        ran = kvtape("doctor", "--contract", "--evidence", other)
        assert (ran.code, ran.err.count("\n")) == (2, 1), ran.err


def test_logs_and_evidence_belong_to_the_contract(log: Path) -> None:
    ran = kvtape("doctor", log)
    assert (ran.code, "belong to --contract" in ran.err) == (2, True)


CELLS = """
import pytest
pytestmark = pytest.mark.contract('I1')
@pytest.mark.contract('I1', cell=True)
@pytest.mark.parametrize('n', range(3))
def test_cell(n):
    assert n < 2
def test_plain():
    pass
@pytest.mark.skip(reason='not here')
def test_left_out():
    pass
"""


def run_cells(folder: Path, *options: str, pick: str = "") -> tuple[int, Tally]:
    """A test run of its own over CELLS, and what its evidence says of I1."""
    test, path = folder / "test_slots.py", folder / "e.json"
    test.write_text(CELLS)
    where = ["--rootdir", str(folder), "-c", os.devnull, f"{test}{pick}"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--kvtape-evidence", str(path)]
    done = subprocess.run([*command, *options, *where], cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, read_evidence(path).count("I1")


OTHERS = tuple(name for name in REQUIRED["I1"] if name != "test_slots.py")


def test_cells_of_a_matrix_are_counted_and_the_closest_mark_counts(tmp_path: Path) -> None:
    code, count = run_cells(tmp_path)
    assert (code, count.passed, count.failed, count.skipped, count.cells) == (1, 3, 1, 1, 2)
    assert [name.partition("::")[2] for name in count.failures] == ["test_cell[2]"]
    assert count.missing == OTHERS


def test_a_run_that_stopped_early_says_what_it_never_came_to(tmp_path: Path) -> None:
    code, count = run_cells(tmp_path, "-x")
    assert (code, count.passed, count.failed) == (1, 2, 1)
    assert count.missing == (*OTHERS, "2 tests that it never came to")


def test_a_run_of_picked_tests_is_no_proof(tmp_path: Path) -> None:
    code, count = run_cells(tmp_path, pick="::test_plain")
    assert (code, count.passed, count.failed) == (0, 1, 0)
    (said,) = set(count.missing) - set(OTHERS)
    assert said == f"what {tmp_path}/test_slots.py::test_plain left out"


def test_a_file_of_skipped_tests_alone_is_no_proof(tmp_path: Path) -> None:
    _, count = run_cells(tmp_path, pick="::test_left_out")
    assert count.skipped == 1
    assert "test_slots.py" in count.missing


def test_a_place_where_no_evidence_can_be_written_is_refused_before_the_tests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    for place in (tmp_path, tmp_path / "nowhere" / "e.json"):
        ran = subprocess.run(
            [*command, "--kvtape-evidence", str(place), str(tmp_path)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (ran.returncode, "no file can be written there" in ran.stderr) == (4, True), ran.stdout


def test_sources_that_are_edited_while_the_tests_run_are_not_those_that_were_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = EvidenceRecorder(tmp_path / "e.json")
    monkeypatch.setattr(evidence, "sources_digest", lambda: "edited")
    recorder.pytest_sessionfinish(pytest.ExitCode.OK)
    assert read_evidence(tmp_path / "e.json").stale == "the sources have changed since"
