"""Opening files that are not logs, and what a reader may and may not do."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pytest

from kvtape.planner.events import Op
from kvtape.planner.residency import IllegalEvent, fold
from kvtape.traces.errors import LogMissing, LogTooNew, LogUnreadable, NoSuchRow, NotALog, SqlRejected
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.verify import verify
from support.forge import copy_log, edit_log
from support.golden import unpack
from support.logs import KEY, TickClock, event, record_script, run_row, script, session_row, write_log


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("good") / "good.duckdb", [script("s0"), script("s1")])


@pytest.mark.parametrize("reads", [open_log, verify], ids=["open", "verify"])
def test_what_is_not_a_log_says_so(good: Path, tmp_path: Path, reads) -> None:
    foreign = tmp_path / "foreign.duckdb"
    duckdb.connect(str(foreign)).close()
    text = tmp_path / "notes.txt"
    text.write_text("a log of another kind")
    empty = tmp_path / "empty.duckdb"
    empty.touch()
    newer = edit_log(
        good, tmp_path / "newer.duckdb", ["UPDATE meta SET value = '9' WHERE key = 'schema_version'"], rechain=False
    )
    cut = copy_log(good, tmp_path / "cut.duckdb")
    cut.write_bytes(good.read_bytes()[: good.stat().st_size // 2])
    stump = copy_log(good, tmp_path / "stump.duckdb")
    stump.write_bytes(good.read_bytes()[:100])
    cases = [
        (tmp_path / "gone.duckdb", LogMissing, 2),
        (tmp_path, NotALog, 2),
        (foreign, NotALog, 2),
        (text, NotALog, 2),
        (empty, NotALog, 2),
        (newer, LogTooNew, 2),
        (cut, LogUnreadable, 4),
        (stump, LogUnreadable, 4),
    ]
    for path, error, code in cases:
        with pytest.raises(error) as caught:
            reads(path)
        assert caught.value.exit_code == code
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_the_newer_schema_error_names_both_versions(good: Path, tmp_path: Path) -> None:
    sql = "UPDATE meta SET value = '7' WHERE key = 'schema_version'"
    with pytest.raises(LogTooNew, match=r"schema version 7 .* reads up to 2: upgrade"):
        open_log(edit_log(good, tmp_path / "n.duckdb", [sql], rechain=False))


def test_reading_changes_no_byte(good: Path) -> None:
    def state() -> dict[str, tuple[int, bytes]]:
        return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in good.parent.iterdir()}

    before = state()
    with open_log(good) as log:
        log.sql("SELECT count(*) FROM events")
        log.logical_digest()
    verify(good)
    assert state() == before


def test_sql_gives_exact_ids_and_the_names_of_columns(good: Path) -> None:
    with open_log(good) as log:
        columns, rows = log.sql("SELECT session_id AS s, max(resident_digest) AS d FROM events GROUP BY ALL ORDER BY 1")
        digests = [e.resident_digest for e in log.events("r0", "s1")]
    assert columns == ["s", "d"]
    assert rows[1] == ("s1", max(digests))
    assert any(d > 2**63 for d in digests)


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM events",
        "INSERT INTO meta VALUES ('a', 'b')",
        "DROP TABLE events",
        "CREATE TABLE mine (a INTEGER)",
        "SELECT * FROM read_text('/etc/hostname')",
        "COPY events TO '{out}'",
        "ATTACH '{out}' AS other",
        "SET enable_external_access = true",
        "INSTALL httpfs",
        "SELECT * FROM sqlite_scan('a', 'b')",
        "SELECT * FROM read_text('{folder}/kvtape.key')",
        "ATTACH ':memory:' AS other",
        "EXPORT DATABASE '{out}'",
        "SELECT 1; DROP TRIGGER events_no_update ON events",
        "SELECT nonsense",
        "SELECT 'a' FROM",
        " ",
    ],
)
def test_sql_cannot_write_or_reach_out(good: Path, tmp_path: Path, query: str) -> None:
    out = tmp_path / "out"
    with open_log(good) as log:
        with pytest.raises(SqlRejected) as caught:
            log.sql(query.format(out=out, folder=good.parent))
        assert "\n" not in str(caught.value)
        assert log.sql("SELECT count(*) FROM sessions")[1] == [(2,)]
    assert not out.exists()


def test_the_state_at_any_moment_is_the_fold(good: Path) -> None:
    made = script()
    with open_log(good) as log:
        for seq in (0, 5, len(made.events) - 1):
            assert log.state_at("r0", "s0", seq) == fold(made.events[: seq + 1])
        with pytest.raises(NoSuchRow, match="has no event 99; its last is"):
            log.state_at("r0", "s0", 99)


def test_an_illegal_log_says_where_it_is_illegal(tmp_path: Path) -> None:
    with Recorder(tmp_path / "a.duckdb", run_row(), clock=TickClock(), key=KEY) as rec:
        rec.open_session(session_row())
        rec.record(event(0, Op.PREFILL, start=0, stop=2))
    with open_log(tmp_path / "a.duckdb") as log, pytest.raises(IllegalEvent, match="seq 0"):
        log.state_at("r0", "s0")


def test_a_row_that_kvtape_never_writes_is_no_crash(good: Path, tmp_path: Path) -> None:
    bad = edit_log(good, tmp_path / "bad.duckdb", ["UPDATE events SET blocks = 'x' WHERE op = 'evict'"], rechain=True)
    with (
        open_log(bad) as log,
        pytest.raises(LogUnreadable, match=r"bad\.duckdb: events holds what kvtape never writes"),
    ):
        log.events("r0", "s0")


def test_unknown_names_list_the_known(good: Path) -> None:
    with open_log(good) as log:
        with pytest.raises(NoSuchRow, match="no run 'r9'; the log has r0"):
            log.sessions("r9")
        with pytest.raises(NoSuchRow, match="no session 's9'; it has s0, s1"):
            log.events("r0", "s9")


def test_sessions_come_in_the_order_of_their_first_events_and_the_last_live_run_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "a.duckdb"
    with Recorder(path, run_row(), clock=TickClock(), key=KEY) as rec:
        rec.open_session(session_row("z"))
        rec.open_session(session_row("a"))
        rec.open_session(session_row("never"))
        rec.record(event(0, session_id="z", at_ns=1))
        rec.record(event(0, session_id="a", at_ns=2))
    with Recorder(path, run_row("r1", kind="replay"), clock=TickClock(), key=KEY, resume=True) as rec:
        rec.open_session(session_row("b", "r1"))
    with open_log(path) as log:
        assert [s.session_id for s in log.sessions()] == ["z", "a", "never"]
        assert log.default_run().run_id == "r0"
        assert log.events("r0", "never") == []


def test_a_log_without_runs_says_so(good: Path, tmp_path: Path) -> None:
    bad = edit_log(good, tmp_path / "b.duckdb", ["DELETE FROM runs"], rechain=False)
    with open_log(bad) as log, pytest.raises(NoSuchRow, match="holds no run"):
        log.default_run()


def test_snapshots_are_cleaned_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    path = tmp_path / "a.duckdb"
    with Recorder(path, run_row(), clock=TickClock(), key=KEY) as rec:
        record_script(rec, script())
    before = {p.name for p in tmp_path.iterdir()}
    with open_log(path):
        assert {p.name for p in tmp_path.iterdir()} > before
    assert {p.name for p in tmp_path.iterdir()} == before
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(LogUnreadable):
        open_log(path)
    assert {p.name for p in tmp_path.iterdir()} == before


def test_one_event_totals_and_the_last_plan_are_those_of_all_events(tmp_path: Path) -> None:
    names = ("n_tokens", "resident_tokens", "decode_calls")
    with open_log(unpack(tmp_path)) as log:
        for session in ("s0", "scored"):
            events, plans = log.events("r0", session), log.plans("r0", session)
            assert log.event("r0", session) == events[-1]
            assert log.lost_at("r0", session) == next((e.seq for e in events if e.op == Op.LOST), None)
            for at in events:
                assert log.event("r0", session, at.seq) == at
                upto = [e for e in events if e.seq <= at.seq]
                assert log.totals("r0", session, names, at.seq) == {
                    name: sum(getattr(e, name) or 0 for e in upto) for name in names
                }
                made = [plan for seq, plan in sorted(plans.items()) if seq <= at.seq]
                assert log.last_plan("r0", session, at.seq) == (made[-1] if made else None)
        with pytest.raises(NoSuchRow, match="no event 999"):
            log.event("r0", "s0", 999)
        with pytest.raises(NoSuchRow, match="no session 'x'"):
            log.event("r0", "x")
