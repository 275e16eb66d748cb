"""Following: whenever the bytes come, however the file is rotated and the follower dies, the log is the same."""

from __future__ import annotations

import json
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.planner.rows import RunRow
from kvtape.traces.errors import LogExists, LogWriteFailed, SequenceConflict, TraceError
from kvtape.traces.folder import segments
from kvtape.traces.importers.errors import SourceRejected
from kvtape.traces.importers.events import EventMaker
from kvtape.traces.importers.feed import LineFeed
from kvtape.traces.importers.followed import FollowedSource, Patience
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.importers.llama_server import LLAMA_SERVER
from kvtape.traces.importers.marks import mark_path, read_mark
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked
from kvtape.traces.importers.source import Source
from kvtape.traces.importers.tail import FileTail, Piece
from kvtape.traces.reader import open_log
from kvtape.traces.verify import verify
from support.growing import Killed, ScriptedPace, appended, cut_away, followed, killed, logical_digest, renamed

LAUNCH = "slot launch_slot_: id  {0} | task {1} | processing task"
SLOT = "slot update_slots: id  {0} | task {1} | "


def request(slot: int, task: int, start: int, n: int, generated: int, *, memory: bool = True) -> list[str]:
    told = [
        SLOT + f"new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = {n}",
        SLOT + f"n_tokens = {start}, memory_seq_rm [{start}, end)",
        SLOT + f"prompt processing progress, n_tokens = {n}, batch.n_tokens = {n - start}, progress = 1.000000",
        SLOT + f"prompt done, n_tokens = {n}, batch.n_tokens = {n - start}",
    ]
    after = [
        f"slot      release: id  {{0}} | task {{1}} | stop processing: n_tokens = {n + generated - 1}, truncated = 0",
        "slot print_timing: id  {0} | task {1} | ",
        f"prompt eval time =    12.50 ms /    {n - start} tokens (    0.62 ms per token)",
        f"       eval time =    40.00 ms /    {generated} tokens (    4.00 ms per token)",
    ]
    return [line.format(slot, task) for line in [LAUNCH, *(told if memory else ()), *after]]


SHIFT = SLOT.format(0, 3) + "slot context shift, n_keep = 4, n_left = 40, n_discard = 20"
STORY = "\n".join(
    [
        "build: 6970 (unknown) with cc",
        *request(0, 1, 0, 20, 5),
        *request(1, 2, 0, 30, 3),
        "srv  update_slots: all slots are idle",
        *request(0, 3, 20, 44, 9)[:5],
        SHIFT,
        *request(0, 3, 20, 24, 9)[5:],
        "bad utf-8: \udcff\udcfe",
        *request(1, 4, 10, 12, 4)[:-1],
        "",
    ]
).encode("utf-8", "surrogateescape")
LOW = "\n".join(sum((request(i % 2, i, 0, 10 + i, 4, memory=False) for i in range(5)), ["srv start"])).encode() + b"\n"


def rows(data: list[dict[str, Any]]) -> str:
    return json.dumps(data, sort_keys=True)


def events_of(source: Source) -> tuple[str, list[str]]:
    """What EventMaker makes of a source, and the kinds of the warnings."""
    notes = Notes()
    maker = EventMaker("r", "llama-server", 0, bytes(32), content=False)
    for record in LLAMA_SERVER.read(source, notes, Asked()):
        maker.add(record, record.session or "")
    list(maker.closing())
    ordered = sorted(maker.events, key=lambda row: (row["session_id"], row["seq"]))
    return rows(ordered), sorted(w.kind for w in notes.warnings())


def growing(file: Path, acts: list[Any]) -> FollowedSource:
    pace = ScriptedPace(acts, until_quiet=True)
    return FollowedSource(FileTail(file), LineFeed(), pace, Patience(quiet_s=5), lambda quiet: None)


@st.composite
def histories(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, bytes]]]:
    """A log, and how it came: appended anywhere, after a rotation only from a line's beginning."""
    data = draw(st.sampled_from([STORY, LOW, LOW + STORY, STORY.replace(b"\n", b"\r\n"), STORY * 2, STORY[:-1]]))
    cuts = sorted(draw(st.sets(st.integers(1, len(data) - 1), max_size=6)))
    acts, at = [], 0
    for cut in [*cuts, len(data)]:
        kinds = ["append", "rename", "copy"] if at and data[at - 1 : at] == b"\n" else ["append"]
        acts.append((draw(st.sampled_from(kinds)), data[at:cut]))
        at = cut
    return data, acts


@settings(max_examples=60)
@given(histories())
def test_any_history_of_a_file_is_one_story(
    tmp_path_factory: pytest.TempPathFactory, history: tuple[bytes, list[tuple[str, bytes]]]
) -> None:
    data, told = history
    folder = tmp_path_factory.mktemp("grow")
    whole, file = folder / "whole", folder / "server.log"
    whole.write_bytes(data)
    acts: list[Any] = []
    for number, (kind, part) in enumerate(told):
        acts += {"append": [], "rename": [renamed(file, number)], "copy": [cut_away(file, number)]}[kind]
        acts.append(appended(file, part))
    expected, warned = events_of(Source(whole))
    found, kinds = events_of(growing(file, acts))
    assert found == expected
    assert set(kinds) - {"file_cut"} == set(warned)


@settings(max_examples=3)
@given(st.lists(st.integers(1, len(STORY) - 1), min_size=1, max_size=4, unique=True), st.integers(0, 2))
def test_any_split_in_time_and_any_death_give_the_same_log(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], deaths: int
) -> None:
    folder = tmp_path_factory.mktemp("split")
    whole, file, log = folder / "whole", folder / "server.log", folder / "log.duckdb"
    whole.write_bytes(STORY)
    edges = [0, *sorted(cuts), len(STORY)]
    parts = [STORY[a:b] for a, b in pairwise(edges)]
    acts: list[Any] = []
    for i, part in enumerate(parts):
        acts += [appended(file, part), *([killed] if i < deaths else [])]
    while killed in acts:
        at = acts.index(killed)
        with suppress(Killed):
            followed(file, log, acts[: at + 1])
        acts = acts[at + 1 :]
    followed(file, log, acts, until_quiet=True, quiet_s=5)
    import_trace([whole], folder / "whole.duckdb", kvtape_version="0.1.0", format_name="llama-server")
    assert logical_digest(log) == logical_digest(folder / "whole.duckdb")
    assert verify(log).ok
    assert not mark_path(log).exists()


def begun(tmp_path: Path, *acts: Any) -> tuple[Path, Path]:
    """A follower that died after the acts; its file and its log."""
    file, log = tmp_path / "server.log", tmp_path / "log.duckdb"
    with pytest.raises(Killed):
        followed(file, log, [*acts, killed])
    return file, log


def test_rows_are_there_while_it_grows_and_nothing_is_doubled(tmp_path: Path) -> None:
    half = STORY.index(b"srv  update_slots")
    file, log, seen = tmp_path / "server.log", tmp_path / "log.duckdb", list[int]()

    def look() -> None:
        with open_log(log) as tape:
            assert tape.notice is not None
            assert not tape.sealed
            seen.append(tape.sql("SELECT count(*) FROM events")[1][0][0])

    acts = [appended(file, STORY[:half]), look, appended(file, STORY[half:]), look, killed]
    with pytest.raises(Killed):
        followed(file, log, acts)
    assert 0 < seen[0] < seen[1]
    result, follower, _ = followed(file, log, [])
    assert follower.resent == seen[1]
    with open_log(log) as tape:
        assert tape.sealed
        assert tape.sql("SELECT count(*) FROM events")[1] == [(seen[1] + result.events,)]


@pytest.mark.parametrize("rotate", [renamed, cut_away])
def test_it_goes_on_after_a_rotation_while_it_was_dead(tmp_path: Path, rotate: Any) -> None:
    lines = STORY.splitlines(keepends=True)
    first, second, third = (b"".join(part) for part in (lines[:8], lines[8:15], lines[15:]))
    file, log = begun(
        tmp_path, appended(tmp_path / "server.log", first), rotate(tmp_path / "server.log", 2),
        appended(tmp_path / "server.log", second),
    )  # fmt: skip
    mark = read_mark(log)
    assert mark is not None
    assert [p.n_bytes for p in mark.parts] == [len(first), len(second)]
    rotate(file, 1)()
    appended(file, third)()
    followed(file, log, [], until_quiet=True, quiet_s=5)
    whole = tmp_path / "whole"
    whole.write_bytes(STORY)
    import_trace([whole], tmp_path / "whole.duckdb", kvtape_version="0.1.0", format_name="llama-server")
    assert logical_digest(log) == logical_digest(tmp_path / "whole.duckdb")


def test_a_source_that_is_gone_or_another_one_is_refused(tmp_path: Path) -> None:
    file, log = begun(tmp_path, appended(tmp_path / "server.log", STORY))
    file.write_bytes(STORY.replace(b"task.n_tokens = 30", b"task.n_tokens = 29"))
    with pytest.raises(TraceError, match=r"not there any more.*kvtape repair"):
        followed(file, log, [])
    mark_path(log).unlink()
    with pytest.raises(SequenceConflict, match="slot-1 seq 1 came again with other content"):
        followed(file, log, [])
    before = logical_digest(log)
    lines = STORY.splitlines(keepends=True)
    of_slot_1 = [
        b"id  1 |" in b"".join(lines[max(0, i - 2 * (b"eval time" in line)) : i + 1]) for i, line in enumerate(lines)
    ]
    file.write_bytes(b"".join(b"\n" if their else line for line, their in zip(lines, of_slot_1, strict=True)))
    with pytest.raises(SequenceConflict, match="session slot-1 seq 7 did not come again"):
        followed(file, log, [], until_quiet=True, quiet_s=1)
    assert logical_digest(log) == before
    file.write_bytes(STORY)
    followed(file, log, [])
    with pytest.raises(LogExists, match="sealed, so it is finished; give --log a folder"):
        followed(file, log, [])


def test_a_follower_that_died_while_it_sealed_is_sealed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, log = tmp_path / "server.log", tmp_path / "log.duckdb"
    with monkeypatch.context() as patched:
        patched.setattr("kvtape.traces.importers.follow.seal_log", lambda writer: killed())
        with pytest.raises(Killed):
            followed(file, log, [appended(file, STORY), lambda: None])
    with pytest.raises(LogExists, match="sealed, so it is finished"):
        followed(file, log, [appended(file, STORY)])
    with open_log(log) as tape:
        assert tape.sealed


def test_in_a_folder_each_start_is_a_segment_and_no_line_is_read_twice(tmp_path: Path) -> None:
    folder, file = tmp_path / "tapes", tmp_path / "server.log"
    folder.mkdir()
    half = STORY.index(b"srv  update_slots")
    followed(file, folder, [appended(file, STORY[: half + 5])])  # the line that is not whole is left to the next start
    renamed(file, 1)()
    appended(file.with_name("server.log.1"), STORY[half + 5 :])()
    followed(file, folder, [appended(file, STORY)])
    result, _, _ = followed(file, folder, [])
    assert (result.rows, len(segments(folder))) == (0, 2)
    with open_log(folder) as tape:
        found = tape.sql("SELECT session_id, count(*) FROM events WHERE op = 'prompt' GROUP BY ALL ORDER BY ALL")[1]
        runs: list[RunRow] = tape.runs()
        lines = tape.sql(
            "SELECT count(*), count(DISTINCT CAST(detail->>'line' AS INT)) FROM events WHERE op = 'prompt'"
        )
    assert found == [("slot-0", 4), ("slot-1", 4)]
    assert lines[1] == [(8, 8)]
    assert len({run.run_id for run in runs}) == 2


def test_a_dead_segment_goes_on_or_is_sealed(tmp_path: Path) -> None:
    folder, file = tmp_path / "tapes", tmp_path / "server.log"
    folder.mkdir()
    with pytest.raises(Killed):
        followed(file, folder, [appended(file, STORY[:900]), killed])
    followed(file, folder, [appended(file, STORY[900:]), lambda: None])
    assert len(segments(folder)) == 1
    with pytest.raises(Killed):
        followed(file, folder, [appended(file, STORY), killed])
    file.write_bytes(STORY)  # and what the second segment was made of is nowhere
    followed(file, folder, [lambda: None])
    found = segments(folder)
    assert [s.sealed_digest is not None for s in found] == [True] * 3
    assert verify(folder).ok


def test_a_file_that_comes_late_or_never(tmp_path: Path) -> None:
    file, log = tmp_path / "server.log", tmp_path / "log.duckdb"
    nothing: list[Any] = [lambda: None] * 6
    result, _, pace = followed(file, log, [*nothing, appended(file, STORY), lambda: None], file_s=60)
    assert result.sessions == 2
    assert pace.pauses[:8] == [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.01]
    with pytest.raises(SourceRejected, match=r"never.log: no such file after 3 s"):
        followed(tmp_path / "never.log", tmp_path / "none.duckdb", [], until_quiet=True, file_s=3)
    with pytest.raises(SourceRejected, match="no ordinary file"):
        followed(tmp_path, tmp_path / "none.duckdb", [])
    assert not (tmp_path / "none.duckdb").exists()


def test_what_cannot_be_followed(tmp_path: Path) -> None:
    file, log = tmp_path / "a", tmp_path / "log.duckdb"
    for name, text in (("auto", "not recognised by its beginning"), ("mooncake", "mooncake does not grow")):
        with pytest.raises(TraceError, match=f"{text}.*--format kv-events or llama-server"):
            followed(file, log, [], format_name=name)
    file.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(SourceRejected, match="packed, so it does not grow"):
        followed(file, log, [])
    file.write_bytes(b"nothing of interest\n")
    with pytest.raises(TraceError, match="no request in it"):
        followed(file, log, [], until_quiet=True, quiet_s=1)
    assert not log.exists()


def test_a_refused_line_ends_it_with_what_was_before(tmp_path: Path) -> None:
    file, log = tmp_path / "events.jsonl", tmp_path / "log.duckdb"
    stored = {"type": "BlockStored", "block_hashes": [1, 2], "token_ids": list(range(8)), "block_size": 4}
    good = json.dumps({"ts": 1.5, "events": [stored]}).encode() + b"\n"
    acts = [appended(file, good), appended(file, b"{]\n"), appended(file, good)]
    with pytest.raises(TraceError, match=r"events.jsonl, line 2: not JSON.*what came before it is in .*log.duckdb"):
        followed(file, log, acts, format_name="kv-events")
    with open_log(log) as tape:
        assert tape.sealed
        assert tape.sql("SELECT op FROM events ORDER BY seq")[1] == [("open",), ("prefill",), ("close",)]


def test_kv_events_follow_to_the_same_log(tmp_path: Path) -> None:
    file, log, whole = tmp_path / "events.jsonl", tmp_path / "log.duckdb", tmp_path / "whole"
    lines = [
        json.dumps({"ts": i, "events": [{"type": "BlockStored", "block_hashes": [i], "block_size": 4}]}).encode()
        + b"\n"
        for i in range(5)
    ] + [json.dumps({"ts": 9, "events": [{"type": "BlockRemoved", "block_hashes": [2]}]}).encode() + b"\n"]
    whole.write_bytes(b"".join(lines))
    followed(file, log, [appended(file, line) for line in lines] + [lambda: None], format_name="kv-events")
    import_trace([whole], tmp_path / "whole.duckdb", kvtape_version="0.1.0", format_name="kv-events")
    assert logical_digest(log) == logical_digest(tmp_path / "whole.duckdb")


def test_a_cut_file_that_grew_past_the_old_place_is_begun_again(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"first\n")
    tail = FileTail(file)
    assert tail.look() == Piece(b"first\n")
    with file.open("r+b") as handle:
        handle.truncate(0)
        handle.write(b"second, and longer\n")
    assert tail.look() == Piece(b"second, and longer\n", begins=True, cut=True)
    file.unlink()
    assert tail.look() == Piece(b"")
    file.write_bytes(b"third\n")
    assert [tail.look(), tail.look()] == [Piece(b""), Piece(b"third\n", begins=True)]
    tail.close()


def test_a_huge_line_costs_its_beginning_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtape.traces.importers.feed.MOST_LINE", 100)
    feed = LineFeed()
    pieces = [Piece(b"a" * 60), Piece(b"b" * 60), Piece(b"c" * 60 + b"\nnext"), Piece(b" line\n")]
    assert [line for piece in pieces for line in feed.push(piece)] == [b"a" * 60 + b"b" * 40, b"next line\n"]
    assert (feed.too_long, feed.line, feed.parts()[0].n_bytes) == (1, 2, 191)


def test_a_full_disk_loses_nothing_that_was_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, log = tmp_path / "server.log", tmp_path / "log.duckdb"
    half = STORY.index(b"srv  update_slots")

    def fill() -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("kvtape.traces.writer.LogWriter._insert", full)

    acts = [appended(file, STORY[:half]), fill, appended(file, STORY[half:]), lambda: None]
    with pytest.raises(LogWriteFailed, match=r"No space left.*events committed before are safe: make room and start"):
        followed(file, log, acts)
    monkeypatch.undo()
    followed(file, log, [lambda: None])
    (tmp_path / "whole").write_bytes(STORY)
    import_trace([tmp_path / "whole"], tmp_path / "whole.duckdb", kvtape_version="0.1.0", format_name="llama-server")
    assert logical_digest(log) == logical_digest(tmp_path / "whole.duckdb")
