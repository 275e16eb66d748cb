"""Each detector of `verify` against the fault it is there for."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
import pytest

from kvtape.planner.events import Op
from kvtape.traces import definitions
from kvtape.traces.errors import LogUnreadable
from kvtape.traces.findings import FindingKind as Kind
from kvtape.traces.keys import key_id, key_path
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.sidecar import head_path
from kvtape.traces.verify import VerifyResult, verify
from support.forge import copy_log, edit_log, own_file
from support.logs import KEY, TickClock, event, record_script, run_row, script, session_row, write_log


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("good") / "good.duckdb", [script("s0"), script("s1")])


def found(result: VerifyResult) -> list[tuple[Kind, int | None, str | None]]:
    assert not result.ok
    return [(f.kind, f.batch, f.table) for f in result.findings]


def batch_of(path: Path, seq: int, session: str = "s0") -> int:
    from kvtape.traces.reader import open_log

    with open_log(path) as log:
        query = f"SELECT batch FROM events WHERE session_id = '{session}' AND seq = {seq}"
        return int(log.sql(query)[1][0][0])


def test_a_good_log_has_no_findings(good: Path) -> None:
    result = verify(good)
    assert result == VerifyResult(True, (), result.rows, result.batches, result.chain_digest, None)
    assert result.batches > 4
    assert result.rows > 30


def test_an_edited_row_names_its_batch_and_what_the_fold_says(good: Path, tmp_path: Path) -> None:
    evict = next(e for e in script().events if e.op == Op.EVICT)
    sql = f"UPDATE events SET stop = stop + 1, n_tokens = n_tokens + 1 WHERE seq = {evict.seq} AND session_id = 's0'"
    bad = edit_log(good, tmp_path / "bad.duckdb", [sql], rechain=False)
    result = verify(bad)
    batch = batch_of(good, evict.seq)
    assert (Kind.ALTERED, batch, "events") in found(result)
    assert {f.batch for f in result.findings} == {batch}
    fold = next(f for f in result.findings if f.kind is Kind.FOLD)
    assert f"session s0 seq {evict.seq} (evict)" in fold.detail


@pytest.mark.parametrize(
    ("table", "sql"),
    [
        ("events", "UPDATE events SET at_ns = at_ns + 1000000 WHERE seq = 3 AND session_id = 's1'"),
        ("events", "UPDATE events SET reason = '' WHERE seq = 3 AND session_id = 's1'"),
        ("events", "UPDATE events SET way = 'rebased' WHERE seq = 3 AND session_id = 's1'"),
        ("events", "UPDATE events SET resident_digest = resident_digest # 1 WHERE seq = 3 AND session_id = 's1'"),
        ("tokens", "UPDATE tokens SET mac = '' WHERE seq = 1 AND session_id = 's1'"),
        ("tokens", "UPDATE tokens SET hashes = '[]' WHERE seq = 1 AND session_id = 's1'"),
        ("sessions", "UPDATE sessions SET threads = 2 WHERE session_id = 's1'"),
        ("runs", "UPDATE runs SET config = '{\"a\":1}'"),
    ],
)
def test_any_edited_column_of_any_table_is_seen(good: Path, tmp_path: Path, table: str, sql: str) -> None:
    sql = sql.replace("resident_digest # 1", "xor(resident_digest, 1::UBIGINT)")
    bad = edit_log(good, tmp_path / "bad.duckdb", [sql], rechain=False)
    altered = [f for f in found(verify(bad)) if f[0] is Kind.ALTERED]
    assert [f[2] for f in altered] == [table]


EDITED_IDS = "UPDATE tokens SET tokens = list_reverse(tokens) WHERE seq = 1 AND session_id = 's1'"


@pytest.mark.parametrize("rechain", [False, True])
def test_edited_token_ids_are_seen_by_their_keyed_hash(good: Path, tmp_path: Path, rechain: bool) -> None:
    bad = edit_log(good, tmp_path / "bad.duckdb", [EDITED_IDS], rechain=rechain)
    assert found(verify(bad)) == [(Kind.CONTENT, batch_of(good, 1, "s1"), "tokens")]


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["gone", "another"])
def test_without_the_key_verify_says_that_it_did_not_look_at_token_ids(
    good: Path, tmp_path: Path, key: bytes | None
) -> None:
    bad = edit_log(good, tmp_path / "bad.duckdb", [EDITED_IDS], rechain=False)
    key_path(bad).unlink() if key is None else key_path(bad).write_bytes(key)
    result = verify(bad)
    assert result.ok
    assert "token ids were not checked" in (result.notice or "")


def test_a_log_whose_content_was_taken_out_still_verifies(good: Path, tmp_path: Path) -> None:
    redacted = edit_log(good, tmp_path / "redacted.duckdb", ["UPDATE tokens SET tokens = NULL"], rechain=False)
    assert verify(redacted) == verify(good)


def test_a_missing_row_is_named(good: Path, tmp_path: Path) -> None:
    bad = edit_log(
        good, tmp_path / "bad.duckdb", ["DELETE FROM events WHERE seq = 5 AND session_id = 's1'"], rechain=False
    )
    result = verify(bad)
    kinds = {k for k, _, _ in found(result)}
    assert {Kind.MISSING, Kind.GAP} <= kinds
    missing = next(f for f in result.findings if f.kind is Kind.MISSING)
    assert missing.batch == batch_of(good, 5, "s1")
    assert "r0/s1 seq 5" in missing.detail


def test_a_repeated_row_is_named(good: Path, tmp_path: Path) -> None:
    sql = "INSERT INTO events SELECT * FROM events WHERE seq = 5 AND session_id = 's1'"
    result = verify(edit_log(good, tmp_path / "bad.duckdb", [sql], rechain=False))
    repeated = next(f for f in result.findings if f.kind is Kind.REPEATED)
    assert "r0/s1 seq 5" in repeated.detail


def test_rows_that_changed_places_are_named(good: Path, tmp_path: Path) -> None:
    sql = "UPDATE events SET seq = CASE seq WHEN 5 THEN 6 ELSE 5 END WHERE seq IN (5, 6) AND session_id = 's1'"
    assert batch_of(good, 5, "s1") == batch_of(good, 6, "s1")
    result = verify(edit_log(good, tmp_path / "bad.duckdb", [sql], rechain=False))
    reordered = next(f for f in result.findings if f.kind is Kind.REORDERED)
    assert "seq 5 stands at 6" in reordered.detail
    assert "seq 6 stands at 5" in reordered.detail


def test_the_order_of_rows_in_the_file_does_not_matter(good: Path, tmp_path: Path) -> None:
    sql = [
        "CREATE TEMP TABLE shuffled AS SELECT * FROM events ORDER BY seq DESC",
        "DELETE FROM events",
        "INSERT INTO events SELECT * FROM shuffled",
    ]
    assert verify(edit_log(good, tmp_path / "moved.duckdb", sql, rechain=False)).ok


def test_a_row_moved_to_another_batch_is_seen_in_both(good: Path, tmp_path: Path) -> None:
    home = batch_of(good, 5, "s1")
    sql = f"UPDATE events SET batch = {home + 1} WHERE seq = 5 AND session_id = 's1'"
    result = verify(edit_log(good, tmp_path / "bad.duckdb", [sql], rechain=False))
    assert {(f.kind, f.batch) for f in result.findings if f.kind is not Kind.FOLD} == {
        (Kind.MISSING, home),
        (Kind.EXTRA, home + 1),
    }


def test_rows_of_no_batch_are_seen(good: Path, tmp_path: Path) -> None:
    sql = "INSERT INTO blocks SELECT 'r0', 's0', 1, 1, 0, 0, 1, 'user', 'volatile', 999"
    result = verify(edit_log(good, tmp_path / "bad.duckdb", [sql], rechain=False))
    assert found(result) == [(Kind.STRAY, 999, "blocks")]


def test_a_batch_cut_out_whole_is_seen(good: Path, tmp_path: Path) -> None:
    gone = batch_of(good, 5, "s1")
    sql = [f"DELETE FROM {t} WHERE batch = {gone}" for t in ("events", "tokens", "batches")]
    kinds = {k for k, _, _ in found(verify(edit_log(good, tmp_path / "bad.duckdb", sql, rechain=False)))}
    assert {Kind.BATCH_MISSING, Kind.GAP} <= kinds


@pytest.mark.parametrize(
    "column",
    ["rows = rows + 1", "spans = '[]'", "spans = 'x'", "spans = '[[1, 2]]'", "previous = digest", "digest = previous"],
)
def test_an_edited_batch_row_is_seen(good: Path, tmp_path: Path, column: str) -> None:
    bad = edit_log(good, tmp_path / "bad.duckdb", [f"UPDATE batches SET {column} WHERE batch = 3"], rechain=False)
    assert {(Kind.CHAIN, 3, "batches")} <= set(found(verify(bad)))


def test_a_row_missing_from_a_batch_whose_spans_are_no_json_is_seen(good: Path, tmp_path: Path) -> None:
    batch = batch_of(good, 5, "s1")
    sql = [f"UPDATE batches SET spans = 'x' WHERE batch = {batch}", f"DELETE FROM events WHERE batch = {batch}"]
    kinds = {k for k, b, _ in found(verify(edit_log(good, tmp_path / "bad.duckdb", sql, rechain=False))) if b == batch}
    assert {Kind.CHAIN, Kind.MISSING} <= kinds


def test_edited_meta_rows_are_seen(good: Path, tmp_path: Path) -> None:
    sql = "UPDATE meta SET value = '9' WHERE key = 'kvtape_version'"
    assert (Kind.CHAIN, 1, "batches") in found(verify(edit_log(good, tmp_path / "b.duckdb", [sql], rechain=False)))


def test_a_rewritten_chain_is_seen_by_the_sidecar_alone(good: Path, tmp_path: Path) -> None:
    sql = "UPDATE events SET reason = 'forged' WHERE seq = 5 AND session_id = 's1'"
    forged = edit_log(good, tmp_path / "forged.duckdb", [sql], rechain=True)
    assert verify(forged).ok
    head_path(forged).write_bytes(head_path(good).read_bytes())
    assert [k for k, _, _ in found(verify(forged))] == [Kind.HEAD_MISMATCH, Kind.FILE]


def test_a_rechained_log_verifies_even_without_its_last_events(good: Path, tmp_path: Path) -> None:
    last = script().events[-1].seq
    sql = f"DELETE FROM events WHERE session_id = 's0' AND seq = {last}"
    assert verify(edit_log(good, tmp_path / "forged.duckdb", [sql], rechain=True)).ok


def test_a_lost_tail_is_seen(tmp_path: Path) -> None:
    live = write_log(tmp_path / "live.duckdb", seal=False)
    result = verify(live)
    assert result.ok
    (tmp_path / "live.duckdb.wal").unlink()
    result = verify(live)
    assert found(result) == [(Kind.LOST_TAIL, 1, None)]
    assert "tail of live.duckdb is lost (batches 1 to" in (result.notice or ""), (
        "every reader says it, not verify alone"
    )
    with pytest.raises(LogUnreadable, match=r"is lost \(batches 1 to .*kvtape repair"):
        open_log(live)


def test_a_tail_cut_off_the_write_ahead_log_is_seen(tmp_path: Path) -> None:
    live = write_log(tmp_path / "live.duckdb", seal=False)
    wal = tmp_path / "live.duckdb.wal"
    wal.write_bytes(wal.read_bytes()[:-300])
    result = verify(live)
    assert [k for k, _, _ in found(result)] == [Kind.LOST_TAIL]
    assert "are lost" in result.findings[0].detail


def test_a_file_ahead_of_its_head_is_fine(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.duckdb", run_row(), clock=TickClock(), key=KEY)
    recorder.open_session(session_row())
    recorder.record(event(0, Op.OPEN, n_tokens=8))
    recorder.flush()
    old = head_path(recorder.path).read_bytes()
    recorder.record(event(1))
    recorder.close()
    head_path(recorder.path).write_bytes(old)
    assert verify(recorder.path).ok
    from kvtape.traces.reader import open_log

    with open_log(recorder.path) as log:
        assert log.unacknowledged == 1
        assert "1 events past the acknowledged head" in (log.notice or "")


def test_the_sidecar_must_be_there_whole_and_this_logs_own(good: Path, tmp_path: Path) -> None:
    bad = copy_log(good, tmp_path / "bad.duckdb")
    head = json.loads(head_path(bad).read_text())
    cases = [
        (json.dumps(head | {"log_id": "0" * 16}), Kind.HEAD_FOREIGN),
        (json.dumps(head | {"rows": head["rows"] + 1}), Kind.HEAD_MISMATCH),
        (json.dumps(head | {"sessions": {}}), Kind.HEAD_MISMATCH),
        (json.dumps(head | {"batch": head["batch"] + 1}), Kind.LOST_TAIL),
        (json.dumps(head | {"batch": "x"}), Kind.HEAD_DAMAGED),
        (json.dumps(head)[:-5], Kind.HEAD_DAMAGED),
        ("[]", Kind.HEAD_DAMAGED),
        ("", Kind.HEAD_DAMAGED),
    ]
    for text, kind in cases:
        head_path(bad).write_text(text)
        assert [k for k, _, _ in found(verify(bad))] == [kind], text
    head_path(bad).unlink()
    assert [k for k, _, _ in found(verify(bad))] == [Kind.HEAD_MISSING]


def test_flipped_bytes_in_the_file_are_never_silent(good: Path, tmp_path: Path) -> None:
    """DuckDB's own checksums refuse a used block; flips elsewhere change nothing that is read."""
    whole, expected = good.read_bytes(), verify(good)
    refused = 0
    for i in range(24):
        at = 4096 + (len(whole) - 4096) * i // 24 + 17
        bad = copy_log(good, tmp_path / f"flip{i}.duckdb")
        bad.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        try:
            assert verify(bad) == expected
        except LogUnreadable:
            refused += 1
    assert refused > 0


def test_flipped_bytes_in_the_write_ahead_log_are_never_silent(tmp_path: Path) -> None:
    """Among them the length fields, over which DuckDB drops the rest of the log without a word."""
    live = write_log(tmp_path / "live.duckdb", seal=False)
    wal = (tmp_path / "live.duckdb.wal").read_bytes()
    outcomes = set()
    for i, at in enumerate([*range(0, len(wal), len(wal) // 24), *range(40, 64, 3)]):
        bad = copy_log(live, tmp_path / f"w{i}.duckdb")
        flipped = wal[:at] + bytes([wal[at] ^ 0x40]) + wal[at + 1 :]
        bad.with_name(bad.name + ".wal").write_bytes(flipped)
        try:
            result = verify(bad)
            assert not result.ok, f"a flip at byte {at} went unseen"
            outcomes.add("finding")
        except LogUnreadable:
            outcomes.add("unreadable")
    assert "unreadable" in outcomes


def test_a_lost_event_accounts_for_the_seqs_it_stands_for(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "a.duckdb", run_row(), clock=TickClock(), key=KEY)
    record_script(recorder, script())
    recorder.seal()
    sql = [
        "UPDATE events SET op = 'lost', detail = '{\"events\": 3}' WHERE seq = 4",
        "DELETE FROM events WHERE seq IN (5, 6)",
    ]
    assert not [
        f for f in verify(edit_log(recorder.path, tmp_path / "b.duckdb", sql, rechain=False)).findings
        if f.kind is Kind.GAP
    ]  # fmt: skip


def test_a_key_id_does_not_give_the_key_away() -> None:
    assert key_id(KEY) != key_id(bytes(32))
    assert KEY.hex() not in key_id(KEY)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DROP TRIGGER events_no_update ON events", "trigger events_no_update is gone"),
        ("DROP VIEW fatals", "view fatals is gone"),
        ("CREATE OR REPLACE VIEW costs AS SELECT 1 AS run_id", "view costs was changed"),
        ("CREATE VIEW mine AS SELECT 1", "view mine does not belong to a log"),
        ("CREATE MACRO json_valid(x) AS true", "macro json_valid does not belong to a log"),
        ("ALTER TABLE append_only ADD COLUMN more INTEGER", "table append_only was changed"),
    ],
)
def test_views_and_triggers_are_those_of_the_code(good: Path, tmp_path: Path, statement: str, said: str) -> None:
    bad = copy_log(good, tmp_path / "bad.duckdb")
    with duckdb.connect(str(bad)) as connection:
        connection.execute(statement)
    result = verify(own_file(bad))
    assert [(f.kind, f.detail) for f in result.findings] == [(Kind.DEFINITION, said)]


def test_definitions_of_another_kvtape_are_not_compared_and_that_is_said(
    good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(definitions, "definitions_digest", lambda: "another")
    result = verify(good)
    assert result.ok
    assert "not compared" in (result.notice or "")
