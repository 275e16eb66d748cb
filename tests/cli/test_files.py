"""A file that a command writes is there whole or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kvtape.cli.files import write_whole


def test_what_was_there_stays_until_the_new_text_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "answers.json"
    write_whole(path, "old")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_whole(path, "new, and longer")
    assert path.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["answers.json"]
    write_whole(path, "new")
    assert path.read_text(encoding="utf-8") == "new"


@pytest.mark.parametrize("name", ["missing/answers.json", "folder", "."])
def test_an_error_names_the_file_that_was_asked_for(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError) as raised:
        write_whole(tmp_path / name, "text")
    assert raised.value.filename == str(tmp_path / name)
    assert raised.value.errno in (errno.ENOENT, errno.EISDIR)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    for text in ("made", "written again"):
        write_whole(tmp_path / "link", text)
        assert (tmp_path / "file").read_text(encoding="utf-8") == text
    assert (tmp_path / "link").is_symlink()


def test_what_is_no_file_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(pipe, "text")
        assert os.read(reading, 100) == b"text"
    finally:
        os.close(reading)
    assert pipe.is_fifo()
    assert [p.name for p in tmp_path.iterdir()] == ["pipe"]


def test_two_processes_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one writes the same file whole while this one is between its bytes and its rename."""
    path = tmp_path / "answers.json"
    fsync = os.fsync

    def meanwhile(descriptor: int) -> None:
        fsync(descriptor)
        monkeypatch.setattr(os, "fsync", fsync)
        with monkeypatch.context() as other:
            other.setattr(os, "getpid", lambda: 1)
            write_whole(path, "theirs")
        assert path.read_text(encoding="utf-8") == "theirs"

    monkeypatch.setattr(os, "fsync", meanwhile)
    write_whole(path, "ours")
    assert path.read_text(encoding="utf-8") == "ours"
    assert [p.name for p in tmp_path.iterdir()] == ["answers.json"]
