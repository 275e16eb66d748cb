"""show, sql, verify and diff over a recorded log, and over files that are no log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtape.planner.residency import fold
from kvtape.traces.reader import open_log
from support.command import kvtape, kvtape_process
from support.forge import copy_log, edit_log
from support.recorded import record


def test_show_is_the_fold_at_every_event(log: Path) -> None:
    with open_log(log) as tape:
        events = tape.events(tape.default_run().run_id, "main")
    for at in range(len(events)):
        ran = kvtape("show", log, "--at", at, "--json")
        assert ran.code == 0, ran.err
        (shown,) = json.loads(ran.out)["sessions"]
        state = fold(events[: at + 1])
        assert shown["seq"] == at
        assert [tuple(r) for r in shown["resident"]] == state.resident.as_pairs()
        assert [tuple(r) for r in shown["dropped"]] == state.dropped.as_pairs()
        assert [c[0] for c in shown["cold"]] == [b.block_id for b in state.cold]
        assert shown["tape_length"] == state.tape_length
        assert (shown["last_plan"] is not None) == any(e.op == "plan" for e in events[: at + 1])


def test_show_for_people(log: Path) -> None:
    shown = kvtape("show", log)
    assert "# session main" in shown.out
    assert "resident\t" in shown.out
    assert "logical digest " in shown.err


@pytest.mark.parametrize(
    ("more", "words"), [(["--session", "other"], "it has: main"), (["--at", "9999"], "no event 9999")]
)
def test_show_says_what_there_is(log: Path, more: list[str], words: str) -> None:
    ran = kvtape("show", log, *more)
    assert ran.code == 2
    assert words in ran.err


def test_a_log_of_many_sessions_names_some_of_them(tmp_path: Path) -> None:
    row = '{{"timestamp": {}, "input_length": 5, "output_length": 1, "hash_ids": [{}]}}\n'
    trace, log = tmp_path / "trace.jsonl", tmp_path / "trace.duckdb"
    trace.write_text("".join(row.format(i, i) for i in range(23)))
    assert kvtape("import", trace, "--log", log).code == 0
    for args in (["show", log, "--at", 1], ["show", log, "--session", "other"], ["explain", log, 1]):
        ran = kvtape(*args)
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert "line-0000001, line-0000002" in ran.err
        assert ran.err.endswith("line-0000020 and 3 more\n")
    assert "made one by kvtape import" in kvtape("show", trace).err


def test_sql_gives_columns_and_rows_with_exact_integers(log: Path) -> None:
    query = (
        "SELECT seq, op, resident_digest FROM events WHERE resident_digest IS NOT NULL ORDER BY resident_digest DESC"
    )
    ran = kvtape("sql", log, query, "--json")
    body = json.loads(ran.out)
    assert body["columns"] == ["seq", "op", "resident_digest"]
    with open_log(log) as tape:
        events = {e.seq: e for e in tape.events(tape.default_run().run_id, "main")}
    assert all(row["resident_digest"] == events[row["seq"]].resident_digest for row in body["rows"])
    assert body["rows"][0]["resident_digest"] > 2**53
    assert body["digest_kind"] == "chain"


def test_sql_from_stdin(log: Path) -> None:
    assert kvtape_process(["sql", log, "-"], stdin=b"SELECT 40 + 2 AS answer").out.startswith("answer\n42\n")


@pytest.mark.parametrize("query", ["DELETE FROM events", "SELECT * FROM nothing", "SELEC", "SELECT * FROM 'x.csv'"])
def test_sql_that_is_wrong_or_would_write_is_refused(log: Path, query: str) -> None:
    before = log.read_bytes()
    ran = kvtape("sql", log, query)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert log.read_bytes() == before


INTERRUPTS_ITSELF = """
import os, signal, sys, threading
from kvtape.cli import main
import kvtape.cli.logs, kvtape.cli.output, kvtape.cli.sql, kvtape.traces.reader
signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Timer(float(sys.argv[1]), os.kill, (os.getpid(), signal.SIGINT)).start()
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("after_s", [0.1, 1.5])
def test_ctrl_c_stops_a_query_that_is_one_long_task(log: Path, after_s: float) -> None:
    """In a process of its own: what an interrupt leaves of the database's threads is no business of other tests."""
    query = "SELECT sum(a.range * b.range) FROM range(1000000) a, range(100000) b"
    ran = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", INTERRUPTS_ITSELF, str(after_s), "sql", str(log), query],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (130, "kvtape: interrupted\n")


def test_a_damaged_block_that_only_a_query_touches_is_exit_4(log: Path, tmp_path: Path) -> None:
    """The file opens, since its header and catalog are whole."""
    bad = copy_log(log, tmp_path / "bad.duckdb")
    query = "SELECT count(*), sum(hash(events)), sum(hash(blocks)) FROM events, blocks"
    data = log.read_bytes()
    codes = []
    for at in range(3 * 4096 + 100, len(data), 16 * 1024):
        bad.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        codes.append(kvtape("sql", bad, query).code)
    assert set(codes) <= {0, 4}
    assert codes.count(4) > 2


def test_sql_of_values_that_json_has_no_word_for(log: Path) -> None:
    ran = kvtape(
        "sql", log, "SELECT DATE '2020-01-02' AS d, 'a'::BLOB AS b, [1, 2] AS l, {'k': 1} AS s, NULL AS n", "--json"
    )
    assert json.loads(ran.out)["rows"] == [{"b": "61", "d": "2020-01-02", "l": [1, 2], "n": None, "s": {"k": 1}}]


def test_sql_of_numbers_that_json_has_no_word_for(log: Path) -> None:
    ran = kvtape("sql", log, "SELECT 'inf'::DOUBLE AS i, ['-inf'::DOUBLE, 0.5] AS l, 'nan'::DOUBLE AS n", "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["rows"] == [{"i": "inf", "l": ["-inf", 0.5], "n": "nan"}]


def test_two_columns_of_one_name_are_not_merged_in_silence(log: Path) -> None:
    ran = kvtape("sql", log, "SELECT 1 AS a, 2 AS a, 3 AS b", "--json")
    assert ran.code == 2
    assert "a is there twice; use AS" in ran.err
    assert "1\t2\t3" in kvtape("sql", log, "SELECT 1 AS a, 2 AS a, 3 AS b").out


LOST_SEQ = 4
NULLS = ("start", "stop", "n_tokens", "cache_start", "way", "cold", "blocks")
NULLS += ("resident_tokens", "resident_digest", "layout_digest")
LOSS = [
    """UPDATE events SET op = 'lost', reason = 'queue_full', detail = '{"events":3}', """
    + ", ".join(f"{name} = NULL" for name in NULLS)
    + f" WHERE seq = {LOST_SEQ}",
    "DELETE FROM events WHERE seq IN (5, 6)",
    "DELETE FROM tokens WHERE seq IN (4, 5, 6)",
]
"""The log as it would be had the queue been full: one event stands for three, the next seqs go on behind them."""


@pytest.fixture
def lossy(log: Path, tmp_path: Path) -> Path:
    return edit_log(log, tmp_path / "lossy.duckdb", LOSS, rechain=True)


def test_a_log_that_lost_events_is_shown_as_far_as_it_is_known(lossy: Path) -> None:
    assert kvtape("verify", lossy).code == 0
    ran = kvtape("show", lossy, "--json")
    assert ran.code == 0, ran.err
    assert f"lost events from {LOST_SEQ} on" in ran.err
    (shown,) = json.loads(ran.out)["sessions"]
    assert (shown["seq"], shown["op"]) == (LOST_SEQ, "lost")
    (before,) = json.loads(kvtape("show", lossy, "--at", LOST_SEQ - 1, "--json").out)["sessions"]
    assert shown["resident"] == before["resident"]
    beyond = kvtape("show", lossy, "--at", LOST_SEQ + 3)
    assert beyond.code == 2
    assert f"--at {LOST_SEQ}" in beyond.err


def test_diff_behind_lost_events_names_seqs_not_places(log: Path, lossy: Path, tmp_path: Path) -> None:
    statements = [*LOSS, "UPDATE events SET reason = 'other' WHERE seq = 9"]
    changed = edit_log(log, tmp_path / "b.duckdb", statements, rechain=True)
    first = json.loads(kvtape("diff", lossy, changed, "--json").out)["first_difference"]
    assert first["seq"] == 9
    assert [row[0] for row in first["context"]] == [2, 3, 4, 7, 8]


def test_verify_of_a_sound_log(log: Path) -> None:
    body = json.loads(kvtape("verify", log, "--json").out)
    assert (body["ok"], body["findings"]) == (True, [])
    assert body["digest_kind"] == "chain"


def test_verify_names_the_batch_of_an_edited_row(log: Path, tmp_path: Path) -> None:
    """One evict row's range is edited, triggers dropped, the chain left as it was."""
    forged = edit_log(log, tmp_path / "forged.duckdb", ["UPDATE events SET stop = stop - 1 WHERE op = 'evict'"], False)
    ran = kvtape("verify", forged, "--json")
    assert ran.code == 1
    findings = json.loads(ran.out)["findings"]
    with open_log(log) as tape:
        (batches,) = [tuple(r[0] for r in tape.sql("SELECT DISTINCT batch FROM events WHERE op = 'evict'")[1])]
    assert {f["batch"] for f in findings if f["kind"] == "altered"} == set(batches)
    plain = kvtape("verify", forged)
    assert plain.code == 1
    assert "NOT what was written" in plain.out


def test_show_of_a_log_that_contradicts_itself_is_a_finding(log: Path, tmp_path: Path) -> None:
    forged = edit_log(log, tmp_path / "forged.duckdb", ["UPDATE events SET stop = stop - 1 WHERE op = 'evict'"], True)
    ran = kvtape("show", forged)
    assert ran.code == 1
    assert "seq" in ran.err


def test_diff_of_a_log_with_itself(log: Path) -> None:
    body = json.loads(kvtape("diff", log, log, "--json").out)
    assert (body["same"], body["first_difference"]) == (True, None)


def test_diff_finds_the_first_event_that_differs(model: Path, log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.duckdb"
    assert record(model, other, "--content", "--decode", 13).code == 0
    ran = kvtape("diff", log, other, "--json")
    assert ran.code == 1
    first = json.loads(ran.out)["first_difference"]
    with open_log(log) as tape:
        events = tape.events(tape.default_run().run_id, "main")
    generate = next(e for e in events if e.op == "generate")
    assert (first["session"], first["seq"]) == ("main", generate.seq)
    assert ["n_tokens", 12, 13] in first["fields"]
    assert first["a"]["n_tokens"] == 12
    assert [row[0] for row in first["context"]] == list(range(generate.seq - 5, generate.seq))
    assert "first difference: session main, event" in kvtape("diff", log, other).out


def test_diff_of_sessions_opened_differently(model: Path, log: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.duckdb"
    assert record(model, other, "--content", "--threads", 2).code == 0
    first = json.loads(kvtape("diff", log, other, "--json").out)["first_difference"]
    assert first["fields"] == [["threads", 1, 2]]


@pytest.mark.parametrize("verb", ["show", "verify", "sql", "diff", "replay"])
def test_what_is_no_log_is_exit_2_and_what_is_torn_exit_4(verb: str, log: Path, tmp_path: Path) -> None:
    more: dict[str, list[object]] = {"sql": ["SELECT 1"], "diff": [log], "replay": ["--on", "llama"]}
    foreign = tmp_path / "foreign.duckdb"
    foreign.write_bytes(b"not a database at all" * 100)
    torn = tmp_path / "torn.duckdb"
    torn.write_bytes(log.read_bytes()[:100_000])
    for path, code in ((tmp_path / "none.duckdb", 2), (foreign, 2), (tmp_path, 2), (torn, 4)):
        ran = kvtape(verb, path, *more.get(verb, []))
        assert ran.code == code, ran.err
        assert ran.err.count("\n") == 1
        assert path.name in ran.err


def test_a_log_without_its_head_is_readable_but_not_verified(log: Path, tmp_path: Path) -> None:
    copy = copy_log(log, tmp_path / "copy.duckdb")
    copy.with_name("copy.duckdb.head.json").unlink()
    assert kvtape("show", copy).code == 0
    assert kvtape("verify", copy).code == 1
