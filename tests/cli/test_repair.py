"""`kvtape repair` at the command line, and what every other verb says of a log that needs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.command import kvtape
from support.logs import script, write_log


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    path = write_log(tmp_path / "torn.duckdb", seal=False)
    wal = tmp_path / "torn.duckdb.wal"
    wal.write_bytes(wal.read_bytes()[:-300])
    return path


@pytest.mark.parametrize(
    "verb", [["show"], ["sql", "SELECT 1"], ["replay", "--on", "llama"], ["diff"]], ids=lambda v: v[0]
)
def test_a_log_with_a_lost_tail_is_torn_for_every_verb(torn: Path, tmp_path: Path, verb: list[str]) -> None:
    whole = write_log(tmp_path / "whole.duckdb")
    name, *rest = verb
    ran = kvtape(name, torn, *([whole] if name == "diff" else []), *rest, "--json")
    assert ran.code == 4
    assert ran.out == ""
    assert "the acknowledged tail of torn.duckdb is lost (batches 5 to 5)" in ran.err
    assert f"kvtape repair {torn} --out NEW" in ran.err
    assert kvtape("verify", torn).code == 1


def test_repair_says_what_it_cut_and_exits_with_1(torn: Path, tmp_path: Path) -> None:
    out = tmp_path / "new.duckdb"
    ran = kvtape("repair", torn, "--out", out, "--json")
    assert ran.code == 1, ran.err
    body = json.loads(ran.out)
    kept = body["kept"]["events"]
    last = script().events[-1].seq
    assert body["cut"]["batches"] == [5, 5]
    assert body["cut"]["sessions"] == {"r0/s0": [kept, last]}
    assert body["cut"]["events"] == last + 1 - kept > 0
    shown = kvtape("show", out)
    assert shown.code == 0
    assert "acknowledged batches 5 to 5 are lost" in shown.err
    assert kvtape("verify", out).code == 0


def test_a_log_that_lacks_only_its_seal_is_sealed_with_0(tmp_path: Path) -> None:
    path = write_log(tmp_path / "killed.duckdb", seal=False)
    ran = kvtape("repair", path, "--out", tmp_path / "new.duckdb")
    assert ran.code == 0, ran.err
    assert "nothing was cut" in ran.out
    again = kvtape("repair", path, "--out", tmp_path / "new.duckdb")
    assert again.code == 2
    assert "already there" in again.err


def test_what_it_says_names_the_log_and_no_copy_of_it(tmp_path: Path) -> None:
    log = write_log(tmp_path / "half.duckdb")
    log.write_bytes(log.read_bytes()[: 4096 * 40])
    ran = kvtape("repair", log, "--out", tmp_path / "new.duckdb")
    assert (ran.code, ran.err.startswith(f"kvtape: {log}: ")) == (4, True), ran.err
    assert "a copy of it" in ran.err
    assert "snapshot" not in ran.err
    whole = write_log(tmp_path / "whole.duckdb")
    whole.with_name("whole.duckdb.head.json").write_text("{", encoding="utf-8")
    ran = kvtape("repair", whole, "--out", tmp_path / "new.duckdb")
    assert ran.code == 0, ran.err
    assert "kvtape: whole.duckdb.head.json is damaged" in ran.err
    assert "snapshot" not in ran.err
