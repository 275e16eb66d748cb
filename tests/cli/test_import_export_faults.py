"""import and export where something comes between: Ctrl-C, a folder that cannot be written, a closed pipe, a rival."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtape.traces import parquet_files
from kvtape.traces.exporters import exporting
from kvtape.traces.importers import reading, writing
from support.command import kvtape

ROWS = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]}\n' * 2
WRITERS = {"parquet": (parquet_files, "_copy"), "jsonl": (exporting, "_write"), "mooncake": (exporting, "give_name")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "trace.jsonl").write_text(ROWS)
    return tmp_path / "trace.jsonl"


def names(folder: Path) -> set[str]:
    """All but the key, which is drawn once for a folder."""
    return {p.name for p in folder.iterdir()} - {"kvtape.key"}


def interrupting(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int = 1, *, after: bool = False
) -> None:
    """Ctrl-C in the `call`th call of a function, before its work or after it."""
    original, calls = getattr(module, name), iter(range(1, 100))

    def replaced(*args: Any, **options: Any) -> Any:
        wanted = next(calls) == call
        if wanted and not after:
            signal.raise_signal(signal.SIGINT)
        result = original(*args, **options)
        if wanted:
            signal.raise_signal(signal.SIGINT)
        return result

    monkeypatch.setattr(module, name, replaced)


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        (reading, "reader_for", 1),
        (writing, "build_file", 1),
        (writing, "_append", 2),
        (writing, "check_copy", 1),
        (writing, "write_head", 1),
        (writing, "give_name", 1),
        (writing, "give_name", 2),
    ],
)
def test_an_interrupted_import_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, call: int
) -> None:
    with monkeypatch.context() as patched:
        interrupting(patched, module, name, call)
        ran = kvtape("import", source, "--log", source.parent / "log.duckdb")
    assert (ran.code, ran.out, ran.err) == (130, "", "kvtape: interrupted\n")
    assert names(source.parent) == {source.name}
    assert kvtape("import", source, "--log", source.parent / "log.duckdb").code == 0


def test_an_interrupt_behind_the_naming_leaves_a_whole_log(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = source.parent / "log.duckdb"
    with monkeypatch.context() as patched:
        interrupting(patched, writing, "give_name", 2, after=True)
        assert kvtape("import", source, "--log", log).code == 130
    assert names(source.parent) == {source.name, log.name, f"{log.name}.head.json"}
    assert kvtape("verify", log).code == 0


@pytest.fixture
def log(source: Path) -> Path:
    assert kvtape("import", source, "--log", source.parent / "log.duckdb").code == 0
    return source.parent / "log.duckdb"


@pytest.mark.parametrize("format_name", WRITERS)
def test_an_interrupted_export_leaves_nothing(log: Path, format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = names(log.parent)
    with monkeypatch.context() as patched:
        interrupting(patched, *WRITERS[format_name])
        ran = kvtape("export", log, "--format", format_name, "--out", log.parent / "out")
    assert (ran.code, ran.out, ran.err) == (130, "", "kvtape: interrupted\n")
    assert names(log.parent) == before
    assert kvtape("export", log, "--format", format_name, "--out", log.parent / "out").code == 0


def test_of_two_imports_one_has_the_name(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, check = source.parent / "log.duckdb", writing.check_copy
    rival = []

    def overtaken(*args: Any) -> None:
        check(*args)
        if not rival:
            rival.append(None)
            rival.append(kvtape("import", source, "--log", log))

    monkeypatch.setattr(writing, "check_copy", overtaken)
    ran = kvtape("import", source, "--log", log)
    assert (rival[1].code, ran.code, ran.out) == (0, 2, "")  # type: ignore[attr-defined]
    assert names(source.parent) == {source.name, log.name, f"{log.name}.head.json"}
    assert kvtape("verify", log).code == 0


@pytest.mark.parametrize("format_name", WRITERS)
def test_of_two_exports_one_has_the_name(log: Path, format_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    out, before = log.parent / "out", names(log.parent)
    module, name = WRITERS[format_name]
    original, rival = getattr(module, name), []

    def overtaken(*args: Any) -> Any:
        if not rival:
            rival.append(None)
            rival.append(kvtape("export", log, "--format", format_name, "--out", out))
        return original(*args)

    monkeypatch.setattr(module, name, overtaken)
    ran = kvtape("export", log, "--format", format_name, "--out", out)
    assert rival[1].code == 0, rival[1].err  # type: ignore[attr-defined]
    assert (ran.code, ran.out, f"{out}: already there" in ran.err) == (2, "", True)
    assert names(log.parent) == before | {"out"}


def test_a_reader_that_has_seen_enough_is_no_error(source: Path) -> None:
    log = source.parent / "log.duckdb"
    source.write_text("".join(ROWS.replace('stamp": 0', f'stamp": {i}') for i in range(2000)))
    assert kvtape("import", source, "--log", log).code == 0
    command = [sys.executable, "-m", "kvtape.cli", "export", str(log), "--format", "jsonl", "--out", "-"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline().startswith(b'{"table":"meta"')
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)


@contextmanager
def without_root() -> Iterator[None]:
    """Root writes everywhere, so be somebody else for a moment."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_a_folder_that_cannot_be_written(source: Path, log: Path) -> None:
    commands = [
        ("import", source.name, "--log", "new.duckdb"),
        ("export", log.name, "--format", "jsonl", "--out", "new.jsonl"),
        ("export", log.name, "--format", "parquet", "--out", "new"),
    ]
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        for file in (source, log, log.with_name("log.duckdb.head.json")):
            (Path(folder) / file.name).write_bytes(file.read_bytes())
        there = names(Path(folder))
        try:
            os.chdir(log.parent)
            assert [kvtape(*command).code for command in commands] == [0, 0, 0]  # and all is imported that they need
            os.chdir(folder)
            Path(folder).chmod(0o555)
            with without_root():
                found = [kvtape(*command) for command in commands]
                read = kvtape("sql", log.name, "SELECT count(*) FROM turns")  # needs no room there
        finally:
            os.chdir(here)
            Path(folder).chmod(0o755)
        for ran in found:
            assert (ran.code, ran.out, len(ran.err.splitlines())) == (3, "", 1), ran.err
            assert "Permission denied" in ran.err
            assert "new" in ran.err
        assert (read.code, read.out.split()[-1]) == (0, "2"), read.err
        assert names(Path(folder)) == there
