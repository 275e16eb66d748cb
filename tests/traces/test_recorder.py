"""The recorder: order, resends, overflow, failures, and going on with a log."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import duckdb
import pytest

from kvtape.planner.events import Op
from kvtape.planner.rows import BlockRow, PlanRow
from kvtape.traces.errors import (
    KeyMismatch,
    LogExists,
    LogMissing,
    LogUnreadable,
    LogWriteFailed,
    RecorderClosed,
    SequenceConflict,
    SequenceError,
    SequenceGap,
)
from kvtape.traces.keys import key_path
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import LOST_REASON, Recorder
from kvtape.traces.schema import ALL_TABLES
from kvtape.traces.sidecar import head_path
from kvtape.traces.verify import verify
from kvtape.traces.writer import LogWriter
from support.forge import edit_log
from support.logs import KEY, TickClock, event, record_script, run_row, script, session_row, write_log


def recorder(path: Path, **options: object) -> Recorder:
    options = {"clock": TickClock(), "key": KEY, "max_latency_s": 0.0} | options
    return Recorder(path, run_row(), **options)  # type: ignore[arg-type]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "a.duckdb"


def test_everything_comes_back_as_it_went_in(log: Path) -> None:
    made = script()
    plan = PlanRow(
        run_id="r0", session_id="s0", seq=2, policy="p", trigger="n_ctx", limit_tokens=1, incoming_tokens=2,
        budget_tokens=3, total_tokens=4, hot_tokens=5, protected_tokens=6, overshoot_tokens=7, over_budget=True,
        keep="[]", evict="[]", diagnostics='["é"]',
    )  # fmt: skip
    blocks = [
        BlockRow(run_id="r0", session_id="s0", seq=2, block_id=i, generation=0, start=i, stop=i + 1, segment="user",
                 cache_class="volatile") for i in range(3)
    ]  # fmt: skip
    with recorder(log) as rec:
        rec.open_session(session_row())
        for e in made.events:
            row = made.tokens.get(e.seq)
            extra = {"plan": plan, "blocks": blocks[::-1]} if e.seq == 2 else {}
            rec.record(e, tokens=row and row.tokens, **extra)
        assert rec.flush() == len(made.events)
    with open_log(log) as back:
        assert back.runs() == [run_row()]
        assert back.sessions() == [session_row()]
        assert back.events("r0", "s0") == made.events
        assert back.plans("r0", "s0") == {2: plan}
        assert back.blocks("r0", "s0") == blocks
        assert {q: t.tokens for q, t in back.tokens("r0", "s0").items()} == {
            q: t.tokens for q, t in made.tokens.items()
        }
        assert back.state_at("r0", "s0") == made.state


def test_flush_counts_what_is_durable_and_an_empty_flush_returns(log: Path) -> None:
    with recorder(log) as rec:
        assert rec.flush() == 0
        rec.open_session(session_row())
        assert rec.flush() == 0
        rec.record(event(0))
        rec.record(event(1))
        assert rec.flush() == 2
        assert rec.flush() == 2


def test_without_content_only_hashes_are_stored(log: Path) -> None:
    write_log(log, content=False)
    with open_log(log) as back:
        rows = back.tokens("r0", "s0").values()
        assert rows
        assert all(t.tokens is None for t in rows)
        assert all(json.loads(t.hashes) for t in rows)


def test_other_tokens_are_a_conflict_without_stored_content_too(log: Path) -> None:
    prefill = event(0, Op.PREFILL, start=0, stop=3, n_tokens=3)
    with recorder(log) as rec:
        rec.open_session(session_row(content=False))
        rec.record(prefill, tokens=[1, 2, 3])
        rec.record(prefill, tokens=[1, 2, 3])
        for other in ([1, 2, 4], None):
            with pytest.raises(SequenceConflict, match="other tokens"):
                rec.record(prefill, tokens=other)


def test_a_gap_is_refused_and_the_right_event_still_goes_in(log: Path) -> None:
    with recorder(log) as rec:
        rec.open_session(session_row())
        rec.record(event(0))
        with pytest.raises(SequenceGap, match="seq 2 came, 1 is next"):
            rec.record(event(2))
        rec.record(event(1))
        assert rec.flush() == 2


def test_a_resent_event_is_dropped_and_another_content_is_a_conflict(log: Path) -> None:
    prefill = event(1, Op.PREFILL, start=0, stop=3, n_tokens=3)
    with recorder(log) as rec:
        rec.open_session(session_row())
        rec.open_session(session_row())
        rec.record(event(0))
        rec.record(prefill, tokens=[1, 2, 3])
        rec.record(event(0))  # not even flushed yet
        rec.record(prefill, tokens=[1, 2, 3])
        with pytest.raises(SequenceConflict, match="n_tokens 9; the log has None"):
            rec.record(event(0, n_tokens=9))
        with pytest.raises(SequenceConflict, match="other tokens"):
            rec.record(prefill, tokens=[1, 2, 4])
        with pytest.raises(SequenceConflict, match="session s0"):
            rec.open_session(session_row(threads=4))
        rec.record(event(2))
        assert rec.flush() == 3
    assert verify(log).ok


@pytest.mark.parametrize(
    ("bad", "tokens", "error"),
    [
        (event(0, session_id="nobody"), None, SequenceError),
        (event(0, run_id="other"), None, ValueError),
        (event(0, Op.EVICT, start=0, stop=2), [1, 2], ValueError),
        (event(0, Op.PREFILL, start=0, stop=2), [1], ValueError),
        (event(0, reason="\ud800"), None, ValueError),
    ],
    ids=["unopened", "other run", "tokens on an evict", "too few tokens", "surrogate"],
)
def test_a_bad_event_is_refused_at_once_and_does_no_harm(log: Path, bad, tokens, error) -> None:
    with recorder(log) as rec:
        rec.open_session(session_row())
        with pytest.raises(error):
            rec.record(bad, tokens=tokens)
        rec.record(event(0))
        assert rec.flush() == 1


class Stuck:
    """A log writer that stands still until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self.go, self.entered = threading.Event(), threading.Event()
        append = LogWriter.append_group

        def slow(writer: LogWriter, batches: list) -> object:
            if "runs" not in batches[0]:
                self.entered.set()
                assert self.go.wait(30)
                if error is not None:
                    raise error
            return append(writer, batches)

        monkeypatch.setattr(LogWriter, "append_group", slow)


def test_a_full_queue_drops_and_says_how_much(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    rec = recorder(log, overflow="drop", batch_events=2, queue_events=4)
    for session in ("s0", "s1"):
        rec.open_session(session_row(session))
    assert stuck.entered.wait(30)
    for seq in range(10):
        rec.record(event(seq, turn=seq))
    stuck.go.set()
    rec.flush()
    rec.record(event(10, turn=10))
    rec.record(event(0, session_id="s1"))
    rec.close()
    assert verify(log).ok
    with open_log(log) as back:
        events = back.events("r0", "s0")
        lost = [e for e in events if e.op == Op.LOST]
        assert len(lost) == 1
        n = json.loads(lost[0].detail)["events"]
        assert n >= 5
        assert [e.seq for e in events] == [*range(lost[0].seq + 1), 10]
        assert lost[0].seq + n == 10
        assert (lost[0].reason, lost[0].turn) == (LOST_REASON, lost[0].seq - 1)
        assert [e.seq for e in back.events("r0", "s1")] == [0]


def test_drops_at_the_very_end_are_told_on_close(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    rec = recorder(log, overflow="drop", batch_events=2, queue_events=2)
    rec.open_session(session_row())
    assert stuck.entered.wait(30)
    for seq in range(5):
        rec.record(event(seq))
    threading.Timer(0.1, stuck.go.set).start()
    rec.close()
    with open_log(log) as back:
        assert [(e.seq, e.op) for e in back.events("r0", "s0")] == [(0, Op.SCORE), (1, Op.SCORE), (2, Op.LOST)]


def test_a_full_queue_waits_when_told_to_block(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stuck = Stuck(monkeypatch)
    rec = recorder(log, batch_events=2, queue_events=2)
    rec.open_session(session_row())
    assert stuck.entered.wait(30)
    rec.record(event(0))
    rec.record(event(1))
    waiting = threading.Thread(target=lambda: rec.record(event(2)))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    stuck.go.set()
    waiting.join(30)
    rec.close()
    with open_log(log) as back:
        assert [e.seq for e in back.events("r0", "s0")] == [0, 1, 2]


def test_a_failed_writer_is_told_by_every_later_call(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = recorder(log)
    rec.open_session(session_row())
    rec.record(event(0))
    assert rec.flush() == 1
    Stuck(monkeypatch, OSError(28, "No space left on device")).go.set()
    rec.record(event(1))
    with pytest.raises(LogWriteFailed, match=r"a\.duckdb.*No space left.*1 acknowledged events are safe"):
        rec.flush()
    with pytest.raises(LogWriteFailed):
        rec.record(event(2))
    with pytest.raises(LogWriteFailed):
        rec.close()
    rec.close()
    with open_log(log) as back:
        assert [e.seq for e in back.events("r0", "s0")] == [0]


def test_the_first_error_of_a_block_is_the_one_that_is_raised(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyError), recorder(log) as rec:  # noqa: PT012
        rec.open_session(session_row())
        Stuck(monkeypatch, OSError("disk")).go.set()
        rec.record(event(0))
        raise KeyError("mine")


def test_a_closed_recorder_takes_nothing(log: Path) -> None:
    rec = recorder(log)
    rec.open_session(session_row())
    rec.close()
    rec.close()
    for call in (lambda: rec.record(event(0)), rec.flush, rec.seal):
        with pytest.raises(RecorderClosed):
            call()


def test_nothing_is_ever_written_over(log: Path) -> None:
    with recorder(log) as rec:
        with pytest.raises(LogExists, match="already recording"):
            recorder(log)
        rec.open_session(session_row())
        rec.record(event(0))
    before = log.read_bytes()
    with pytest.raises(LogExists, match="never writes over"):
        recorder(log)
    assert log.read_bytes() == before
    log.unlink()
    with pytest.raises(LogExists, match=r"a\.duckdb\.wal: rows of a log whose file is gone"):
        recorder(log)


def test_the_key_is_drawn_once_and_kept_to_its_owner(log: Path) -> None:
    recorder(log, key=None).close()
    assert key_path(log).stat().st_mode & 0o777 == 0o600
    assert len(key_path(log).read_bytes()) == 32


def test_a_refused_recording_draws_no_key(log: Path) -> None:
    """A key beside a log that has another one would make its own key look like the wrong one."""
    recorder(log).close()
    with pytest.raises(LogExists):
        recorder(log, key=None)
    assert not key_path(log).exists()


def test_a_key_that_could_not_be_written_is_not_there(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtape.traces.keys.os.write", full)
    with pytest.raises(LogWriteFailed, match="No space left"):
        recorder(log, key=None)
    monkeypatch.undo()
    assert list(log.parent.iterdir()) == []
    recorder(log, key=None).close()


def test_a_head_that_could_not_be_written_leaves_no_half_of_one(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = recorder(log)
    rec.open_session(session_row())
    rec.flush()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvtape.traces.sidecar.os.fsync", full)
    rec.record(event(0))
    with pytest.raises(LogWriteFailed, match="0 acknowledged events"):
        rec.close()
    monkeypatch.undo()
    assert sorted(p.name for p in log.parent.iterdir()) == ["a.duckdb", "a.duckdb.head.json", "a.duckdb.wal"]
    assert verify(log).ok


def test_going_on_with_a_log_drops_what_it_has_and_continues_the_hashes(log: Path, tmp_path: Path) -> None:
    made = script()
    whole = write_log(tmp_path / "whole.duckdb", [made], content=False, seal=False)
    half = len(made.events) // 2
    rec = recorder(log)
    rec.open_session(session_row(content=False))
    for e in made.events[:half]:
        rec.record(e, tokens=made.tokens[e.seq].tokens if e.seq in made.tokens else None)
    rec.close()
    with recorder(log, resume=True) as again:
        record_script(again, made, content=False)
    assert verify(log).ok
    with open_log(log) as back, open_log(whole) as straight:
        assert back.events("r0", "s0") == made.events
        assert back.tokens("r0", "s0") == straight.tokens("r0", "s0")
        assert back.logical_digest() == straight.logical_digest()


def test_going_on_without_resending_needs_stored_content_for_hashes(log: Path) -> None:
    def first(content: bool, path: Path) -> list[str]:
        rec = recorder(path)
        rec.open_session(session_row(content=content))
        rec.record(event(0, Op.PREFILL, start=0, stop=2), tokens=[1, 2])
        rec.close()
        with recorder(path, resume=True) as again:
            again.record(event(1, Op.DECODE, start=2, stop=3), tokens=[3])
        with open_log(path) as back:
            return json.loads(back.tokens("r0", "s0")[1].hashes)

    assert len(first(True, log)) == 1
    assert first(False, log.with_name("b.duckdb")) == []


def test_going_on_refuses_what_is_not_the_same(log: Path) -> None:
    with pytest.raises(LogMissing):
        recorder(log, resume=True)
    recorder(log).close()
    with pytest.raises(KeyMismatch, match="another key"):
        recorder(log, resume=True, key=bytes(32))
    with pytest.raises(KeyMismatch, match="key is missing"):
        recorder(log, resume=True, key=None)
    with pytest.raises(SequenceConflict, match="run r0"):
        Recorder(log, run_row(seed=7), clock=TickClock(), key=KEY, resume=True)
    with Recorder(log, run_row("r1"), clock=TickClock(), key=KEY, resume=True) as rec:
        rec.open_session(session_row(run_id="r1"))
        rec.record(event(0, run_id="r1"))
        rec.seal()
    with pytest.raises(LogExists, match="sealed"):
        recorder(log, resume=True)
    with open_log(log) as back:
        assert [r.run_id for r in back.runs()] == ["r0", "r1"]
        assert back.default_run().run_id == "r1"


@pytest.mark.parametrize("head", ["forged chain", "other digest", "damaged", "missing"])
def test_going_on_does_not_write_over_what_the_head_alone_can_tell(log: Path, tmp_path: Path, head: str) -> None:
    write_log(log, seal=False)
    sidecar = head_path(log)
    if head == "forged chain":
        acknowledged = sidecar.read_bytes()
        log = edit_log(log, tmp_path / "forged.duckdb", ["UPDATE events SET reason = 'forged' WHERE seq = 2"], True)
        sidecar = head_path(log)
        sidecar.write_bytes(acknowledged)
    elif head == "other digest":
        sidecar.write_text(json.dumps(json.loads(sidecar.read_text()) | {"digest": "00" * 32}))
    elif head == "damaged":
        sidecar.write_text("{")
    else:
        sidecar.unlink()
    before = sidecar.read_bytes() if sidecar.exists() else None
    with pytest.raises(LogUnreadable, match=r"not the one that was acknowledged|damaged|missing"):
        recorder(log, resume=True)
    assert (sidecar.read_bytes() if sidecar.exists() else None) == before
    assert not verify(log).ok


def test_a_recorder_that_died_before_its_head_can_go_on(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtape.traces.writer.write_head", dies)
    with pytest.raises(KeyboardInterrupt):
        recorder(log)
    monkeypatch.undo()
    recorder(log, resume=True).close()
    assert verify(log).ok


def test_one_process_records_into_a_log_once(log: Path) -> None:
    with recorder(log), pytest.raises(LogExists, match="already recording"):
        recorder(log, resume=True)


def test_sealing_leaves_one_file_and_the_same_rows(log: Path) -> None:
    write_log(log, seal=False)
    with open_log(log) as back:
        before = back.events("r0", "s0"), back.logical_digest(), back.chain_digest
    with recorder(log, resume=True) as rec:
        rec.seal()
    with open_log(log) as back:
        assert (back.events("r0", "s0"), back.logical_digest(), back.chain_digest) == before
        assert back.sealed
        assert back.notice is None
        assert back.head is not None
        assert back.head.sealed
    assert {p.name for p in log.parent.iterdir()} == {"a.duckdb", "a.duckdb.head.json", "kvtape.key"}


@pytest.mark.parametrize("sealed", [True, False])
def test_rows_cannot_be_changed_or_deleted(log: Path, sealed: bool) -> None:
    write_log(log, seal=sealed)
    connection = duckdb.connect(str(log))
    try:
        for table in ALL_TABLES:
            column = connection.execute(f"DESCRIBE {table}").fetchall()[0][0]
            for statement in (
                f"UPDATE {table} SET {column} = {column}",
                f"UPDATE {table} SET {column} = {column} WHERE false",
                f"DELETE FROM {table}",
                f"TRUNCATE {table}",
            ):
                with pytest.raises(duckdb.Error, match=f"{table} is append-only"):
                    connection.execute(statement)
    finally:
        connection.close()
    assert verify(log).ok
    if not sealed:  # that client has moved the rows into the file on closing
        with Recorder(log, run_row(), clock=TickClock(), key=KEY, resume=True) as again:
            again.open_session(session_row("s9"))
            again.record(event(0, session_id="s9"))
        assert verify(log).ok
