"""What a log gives away: a default recording no token id and no byte of text, a redacted one no more than that."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvtape.traces.errors import LogUnreadable
from kvtape.traces.keys import KEY_NAME
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.redact import redact
from kvtape.traces.tape import Tape
from kvtape.traces.verify import verify
from support.command import kvtape
from support.forge import edit_log
from support.logs import TickClock, record_script, run_row, write_log
from support.scripted import Script
from support.tiny_gguf import write_tiny

SECRETS = [1_000_003 + 7_919 * i for i in range(40)]
"""Token ids that occur nowhere by chance, in any of the ways in which integers are written."""


def ways_to_write(token: int) -> list[bytes]:
    return [struct.pack("<i", token), struct.pack("<q", token), struct.pack(">i", token), str(token).encode()]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != KEY_NAME}


def found_in(folder: Path) -> set[tuple[str, int]]:
    """Token ids of `SECRETS` that can be read in the files of a folder, but for the key itself."""
    return {
        (name, token)
        for name, data in files_of(folder).items()
        for token in SECRETS
        for w in ways_to_write(token)
        if w in data
    }


def record(folder: Path, *, content: bool, seal: bool) -> Path:
    folder.mkdir()
    recorder = Recorder(folder / "a.duckdb", run_row(), clock=TickClock())
    made = Script()
    made.prefill(SECRETS)
    made.evict(4, 20, cold=True)
    made.decode(SECRETS[:5])
    made.close()
    record_script(recorder, made, content=content)
    recorder.seal() if seal else recorder.close()
    return recorder.path


@pytest.mark.parametrize("seal", [True, False], ids=["sealed", "recorded"])
def test_no_token_id_can_be_found_in_a_default_recording(tmp_path: Path, seal: bool) -> None:
    record(tmp_path / "default", content=False, seal=seal)
    assert found_in(tmp_path / "default") == set()
    record(tmp_path / "content", content=True, seal=False)
    assert {token for _, token in found_in(tmp_path / "content")} == set(SECRETS), "the search can find them"


def test_no_byte_of_a_text_can_be_found_in_a_default_recording(tmp_path: Path) -> None:
    words = ["Quetzalcoatl", "zirconium", "Przewalski", "xylophone"]
    model, text, folder = write_tiny(tmp_path / "tiny.gguf"), tmp_path / "text.txt", tmp_path / "logs"
    folder.mkdir()
    text.write_text(" ".join(words * 12), encoding="utf-8")
    options = ["--n-ctx", 256, "--chunk", 64, "--decode", 8, "--policy", "stream:sink=4,recent=60"]
    ran = kvtape("record", "--model", model, "--text", text, "--log", folder / "a.duckdb", *options)
    assert ran.code == 0, ran.err
    for name, data in files_of(folder).items():
        for word in words:
            for start in range(len(word) - 5):
                assert word[start : start + 6].encode() not in data, f"{word} in {name}"


def test_without_the_key_a_guess_cannot_be_tested() -> None:
    def hashes(key: bytes) -> list[bytes]:
        tape = Tape(key)
        tape._tokens.extend(SECRETS)
        tape._extend_chain()
        return tape._chain

    assert hashes(bytes(32)) != hashes(bytes([1] * 32))


def test_a_redacted_log_has_no_content_and_still_verifies(tmp_path: Path) -> None:
    path = record(tmp_path / "content", content=True, seal=True)
    out = tmp_path / "redacted" / "r.duckdb"
    out.parent.mkdir()
    before = path.read_bytes()
    report = redact(path, out)
    assert path.read_bytes() == before
    assert report.taken["tokens.tokens"] > 0
    assert found_in(out.parent) == set()
    result = verify(out)
    assert result.ok, result.findings
    assert result.chain_digest == report.digest == verify(path).chain_digest
    with open_log(path) as old, open_log(out) as new:
        assert new.events("r0", "s0") == old.events("r0", "s0")
        assert [t.hashes for t in new.tokens("r0", "s0").values()] == [
            t.hashes for t in old.tokens("r0", "s0").values()
        ]
        assert all(t.tokens is None for t in new.tokens("r0", "s0").values())
    assert {p.name for p in out.parent.iterdir()} == {"r.duckdb", "r.duckdb.head.json"}, "and no key beside it"


def test_redaction_takes_live_logs_and_refuses_false_ones(tmp_path: Path) -> None:
    live = write_log(tmp_path / "live.duckdb", seal=False)
    assert kvtape("redact", live, "--out", tmp_path / "out.duckdb").code == 0
    assert verify(tmp_path / "out.duckdb").ok
    bad = edit_log(live, tmp_path / "bad.duckdb", ["UPDATE events SET at_ns = 1 WHERE seq = 3"], rechain=False)
    with pytest.raises(LogUnreadable, match="does not verify"):
        redact(bad, tmp_path / "never.duckdb")
    assert not (tmp_path / "never.duckdb").exists()
