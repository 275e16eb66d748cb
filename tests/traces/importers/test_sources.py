"""What every format shares: files, stdin, compression, recognising, and that a failure leaves nothing."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest

from kvtape.traces.errors import LogExists, LogWriteFailed, TraceError
from kvtape.traces.folder import new_segment, segments
from kvtape.traces.importers import writing
from kvtape.traces.importers.errors import SourceRejected
from kvtape.traces.importers.importing import import_trace
from kvtape.traces.importers.notes import Notes
from kvtape.traces.importers.protocol import Asked
from kvtape.traces.importers.reading import read_trace
from kvtape.traces.importers.registry import READERS, format_names
from kvtape.traces.importers.source import Source
from kvtape.traces.reader import open_log
from support.imports import column, imported, read, refused, result_of, written

MOONCAKE = b'{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1]}\n'
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,374,44\n"


def test_names_are_unique_and_every_format_says_what_it_is() -> None:
    assert len(set(format_names())) == len(READERS) + 1
    assert "kvtape-jsonl" in format_names()
    assert all(reader.summary and reader.rules.time_unit for reader in READERS)


class _Drip(io.RawIOBase):
    """Gives three bytes at a time, as a slow pipe does."""

    def __init__(self, data: bytes) -> None:
        self._inner = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        return self._inner.readinto(memoryview(buffer)[:3])


@pytest.mark.parametrize("packed", [False, True])
def test_stdin(tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    data = gzip.compress(MOONCAKE) if packed else MOONCAKE

    class Stdin:
        buffer = io.BufferedReader(_Drip(data), 16)

    monkeypatch.setattr(sys, "stdin", Stdin)
    trace = read_trace(["-"], "auto", Asked(), Notes())
    assert (trace.reader.name, len(trace.records)) == ("mooncake", 1)


def test_lines_know_their_numbers_and_blank_ones_count(tmp_path: Path) -> None:
    with Source(written(tmp_path, b"\xef\xbb\xbfa\r\n\n  \nb", "x")) as source:
        assert [(source.line, line) for line in source.lines()] == [(1, b"a"), (4, b"b")]


@pytest.mark.parametrize("data", [b"", b"\n \n", gzip.compress(b"", mtime=0)])
def test_an_empty_file_is_refused(tmp_path: Path, data: bytes) -> None:
    assert "empty" in str(refused(tmp_path, data))


@pytest.mark.parametrize("data", [b"TIMESTAMP,ContextTokens,GeneratedTokens\n", MOONCAKE[:0] + b"\n"])
def test_a_file_without_a_request_is_refused(tmp_path: Path, data: bytes) -> None:
    file = written(tmp_path, data, "none")
    with pytest.raises(TraceError, match="nothing was imported"):
        import_trace([file], tmp_path / "log.duckdb", kvtape_version="0", format_name="azure")


def test_an_unknown_format_lists_those_there_are(tmp_path: Path) -> None:
    for name, data in (("auto", b"what is this\n"), ("vllm", MOONCAKE)):
        error = refused(tmp_path, data, format_name=name)
        assert error.line is None
        assert all(known in str(error) for known in format_names())


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none", "no such file"), (tmp_path, "a folder")):
        with pytest.raises(SourceRejected, match=words):
            import_trace([path], tmp_path / "log.duckdb", kvtape_version="0")


@pytest.mark.parametrize("cut", [20, -6])
def test_a_packed_file_that_is_cut_off(tmp_path: Path, cut: int) -> None:
    error = refused(tmp_path, gzip.compress(MOONCAKE * 50)[:cut])
    assert "damaged or cut off" in str(error)


def test_a_packed_file_with_a_wrong_checksum(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(MOONCAKE * 50))
    data[-6] ^= 1
    assert "damaged or cut off" in str(refused(tmp_path, bytes(data)))


def test_what_is_not_utf8_is_named(tmp_path: Path) -> None:
    error = refused(tmp_path, AZURE + b"2023-11-16 18:15:46.68,37\xff,44\n")
    assert (error.line, "0xff" in str(error)) == (3, True)


def test_several_files_of_one_format(tmp_path: Path) -> None:
    files = [written(tmp_path, MOONCAKE * 2, "a"), written(tmp_path, MOONCAKE, "b")]
    found = read(tmp_path, files)
    assert found.sessions == ["a:line-0000001", "a:line-0000002", "b:line-0000001"]
    assert found.duplicates == 1


def test_several_formats_at_once_are_refused(tmp_path: Path) -> None:
    files = [written(tmp_path, MOONCAKE, "a"), written(tmp_path, AZURE, "b")]
    with pytest.raises(SourceRejected, match="b: is of format azure"):
        import_trace(files, tmp_path / "log.duckdb", kvtape_version="0")


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    file = written(tmp_path, MOONCAKE, "a")
    log = tmp_path / "log.duckdb"
    import_trace([file], log, kvtape_version="0")
    before = log.read_bytes()
    with pytest.raises(LogExists):
        import_trace([file], log, kvtape_version="0")
    assert log.read_bytes() == before


@pytest.mark.parametrize("at", ["taken_rows", "check_copy", "_name"])
def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, at, full)
    file = written(tmp_path, MOONCAKE, "a")
    with pytest.raises(LogWriteFailed, match="nothing was imported"):
        import_trace([file], tmp_path / "log.duckdb", kvtape_version="0")
    assert {p.name for p in tmp_path.iterdir()} <= {"a", "kvtape.key"}


def test_batches_join_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtape.traces.importers.writing._BATCH_EVENTS", 5)
    with imported(tmp_path, MOONCAKE * 7) as log:
        assert column(log, "SELECT count(*) FROM events GROUP BY batch ORDER BY batch") == [6, 6, 6, 5, 5]
        for session in log.sessions():
            assert log.state_at(log.default_run().run_id, session.session_id).closed


def test_a_time_that_no_number_can_hold_is_refused_like_any_other(tmp_path: Path) -> None:
    file = written(tmp_path, MOONCAKE.replace(b": 0,", b": 1e999999999,"), "huge")
    assert "1e999999999" in file.read_text()
    with pytest.raises(SourceRejected, match="beyond 292 years"):
        import_trace([file], tmp_path / "log.duckdb", kvtape_version="0")


def test_in_a_log_folder_an_import_is_a_segment(tmp_path: Path) -> None:
    file, folder = written(tmp_path, MOONCAKE, "a"), tmp_path / "logs"
    folder.mkdir()
    new_segment(folder)
    import_trace([file], folder / "imported.duckdb", kvtape_version="0")
    (segment,) = segments(folder)
    with open_log(folder) as log, open_log(segment.path) as alone:
        assert (segment.path.name, segment.registered, segment.there) == ("imported.duckdb", True, True)
        assert segment.sealed_digest == alone.chain_digest
        assert column(log, "SELECT count(*) FROM events") == column(alone, "SELECT count(*) FROM events") != [0]


def test_reading_takes_a_list_apart_and_counts_all_of_it(tmp_path: Path) -> None:
    with imported(tmp_path, MOONCAKE * 3) as log:
        result = result_of(log)
        assert [result.rows] == column(log, "SELECT count(*) FROM turns") == [3]
        assert [result.events] == column(log, "SELECT count(*) FROM events") == [12]
