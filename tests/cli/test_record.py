"""`kvtape record` on a tiny model: what it writes, what it refuses, and how it ends when it is interrupted."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvtape.backends.session import Session
from kvtape.traces.reader import open_log
from kvtape.traces.recorder import Recorder
from support.command import kvtape, kvtape_process
from support.recorded import POLICY, TEXT, record
from support.tiny_gguf import write_tiny


def small_chunks(model: Path, source: Path, log: Path) -> list[str]:
    """A command that records slowly and in many events."""
    options = ["--n-ctx", "256", "--chunk", "2", "--content", "--policy"]
    where = ["--model", str(model), "--text", str(source), "--log", str(log)]
    return [sys.executable, "-m", "kvtape.cli", "record", *where, *options, POLICY]


def test_a_text_is_recorded_and_the_log_is_sound(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.duckdb"
    ran = record(model, log, "--content", "--json")
    assert ran.code == 0, ran.err
    said = json.loads(ran.out)
    assert said["tape_tokens"] > 256 >= said["resident_tokens"] > 0
    assert said["evicted_tokens"] > 0
    assert said["digest_kind"] == "logical"
    assert kvtape("verify", log).code == 0
    with open_log(log) as tape:
        assert tape.sealed
        assert tape.logical_digest() == said["digest"]
        tokens = tape.tokens(said["run_id"], "main")
    assert sum(len(row.tokens or ()) for row in tokens.values()) == said["tape_tokens"]


def test_without_content_no_token_is_stored(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.duckdb"
    assert record(model, log).code == 0
    with open_log(log) as tape:
        rows = tape.tokens(tape.default_run().run_id, "main").values()
        assert rows
        assert all(row.tokens is None for row in rows)


def test_the_same_recording_twice_has_one_logical_digest(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text(TEXT, encoding="utf-8")
    digests = set()
    for seed in ("1", "2"):
        log = tmp_path / f"{seed}.duckdb"
        args = [
            "record",
            "--model",
            model,
            "--text",
            source,
            "--log",
            log,
            "--policy",
            POLICY,
            "--n-ctx",
            256,
            "--json",
        ]
        ran = kvtape_process(args, PYTHONHASHSEED=seed)
        assert ran.code == 0, ran.err
        digests.add(json.loads(ran.out)["digest"])
    assert len(digests) == 1
    assert kvtape("diff", tmp_path / "1.duckdb", tmp_path / "2.duckdb").code == 0


def test_stdin_is_a_text(model: Path, tmp_path: Path) -> None:
    args = [
        "record",
        "--model",
        model,
        "--text",
        "-",
        "--log",
        tmp_path / "a.duckdb",
        "--n-ctx",
        256,
        "--policy",
        "none",
    ]
    ran = kvtape_process(args, stdin=b"a few words from a pipe")
    assert ran.code == 0, ran.err


def test_a_chat_goes_on_from_the_answer_that_the_file_gives(model: Path, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "Yes, one."},
        {"role": "user", "content": "Two?"},
        {"role": "user", "content": "Three?"},
    ]
    chat = tmp_path / "chat.jsonl"
    chat.write_text("\n".join(json.dumps(m) for m in messages) + "\n", encoding="utf-8")
    log = tmp_path / "a.duckdb"
    ran = kvtape(
        *("record", "--model", model, "--chat", chat, "--log", log),
        *("--n-ctx", 512, "--policy", "class:budget=500", "--decode", 8),
    )
    assert ran.code == 0, ran.err
    with open_log(log) as tape:
        run_id = tape.default_run().run_id
        events = tape.events(run_id, "main")
        segments = {block.segment for block in tape.blocks(run_id, "main")}
    assert [e.turn for e in events if e.op == "prompt"] == [1, 2, 3]
    # The file's answer is another than the generated one, so turn 2 diverges; turn 3 goes on from what was generated.
    assert [e.turn for e in events if e.op == "truncate"] == [2]
    assert {"system", "user", "assistant"} <= segments


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--policy", "strem:sink=4,recent=8"], "did you mean 'stream'"),
        (["--policy", "stream:sink=4"], "recent"),
        (["--policy", "stream:sink=4,recent=508"], "raise the context"),
        (["--policy", "none"], "never evicts"),
        (["--backend", "lama"], "llama"),
        (["--backend", "llama:swa=1"], "known"),
        (["--backend", "llama:way=sideways"], "native, recompute"),
        (["--model", "none.gguf"], "no such model file"),
        (["--n-ctx", "0"], "--n-ctx"),
        (["--decode", "-1"], "--decode"),
    ],
)
def test_bad_options_are_one_line_and_leave_no_log(model: Path, tmp_path: Path, options: list[str], words: str) -> None:
    log = tmp_path / "a.duckdb"
    ran = record(model, log, *options)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert words in ran.err
    assert not list(tmp_path.glob("a.duckdb*"))


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"", "empty"), (b" \n\t ", "empty"), (b"caf\xe9", "not UTF-8 at byte 3")],
)
def test_a_bad_text_is_one_line_and_leaves_no_log(model: Path, tmp_path: Path, data: bytes, words: str) -> None:
    source, log = tmp_path / "text.txt", tmp_path / "a.duckdb"
    source.write_bytes(data)
    ran = kvtape("record", "--model", model, "--text", source, "--log", log)
    assert ran.code == 2
    assert words in ran.err
    assert str(source) in ran.err
    assert not log.exists()


def test_a_text_may_come_through_a_named_pipe(model: Path, tmp_path: Path) -> None:
    """What a shell's `<(command)` is."""
    pipe, log = tmp_path / "pipe", tmp_path / "a.duckdb"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text(TEXT, encoding="utf-8"))
    writer.start()
    ran = kvtape("record", "--model", model, "--text", pipe, "--log", log, "--policy", POLICY, "--decode", 1)
    writer.join()
    assert ran.code == 0, ran.err


def test_a_folder_is_no_text(model: Path, tmp_path: Path) -> None:
    ran = kvtape("record", "--model", model, "--text", tmp_path, "--log", tmp_path / "a.duckdb")
    assert ran.code == 2
    assert f"{tmp_path}: a folder" in ran.err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 1: not JSON"),
        ('{"role": "user"}', "content"),
        ('{"role": "king", "content": "x"}', "allowed: system, user, assistant"),
        ('{"role": "user", "content": " "}', "not empty"),
        ('{"role": "system", "content": "x"}', "no user message"),
    ],
)
def test_a_bad_chat_names_its_line(model: Path, tmp_path: Path, line: str, words: str) -> None:
    chat = tmp_path / "chat.jsonl"
    chat.write_text(line + "\n", encoding="utf-8")
    ran = kvtape("record", "--model", model, "--chat", chat, "--log", tmp_path / "a.duckdb")
    assert ran.code == 2
    assert words in ran.err


def test_text_and_chat_exclude_each_other(model: Path, tmp_path: Path) -> None:
    assert "one of --text and --chat" in kvtape("record", "--model", model, "--log", tmp_path / "a.duckdb").err


def test_a_log_is_never_overwritten(model: Path, tmp_path: Path, log: Path) -> None:
    before = log.read_bytes()
    ran = record(model, log)
    assert ran.code == 2
    assert "exists already" in ran.err
    assert log.read_bytes() == before


def test_an_odd_context_is_made_even_and_both_are_on_record(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.duckdb"
    assert record(model, log, "--n-ctx", 255).code == 0
    with open_log(log) as tape:
        row = tape.sessions()[0]
    assert (row.n_ctx_asked, row.n_ctx) == (255, 256)


def test_an_interrupt_seals_a_log_that_is_sound(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives while the second decode run computes; what was done until then stays."""
    log = tmp_path / "a.duckdb"
    decode = Session.decode

    def interrupted(self: Session, n: int, **more: object) -> object:
        decode(self, 4)
        signal.raise_signal(signal.SIGINT)
        return decode(self, n)

    monkeypatch.setattr(Session, "decode", interrupted)
    ran = record(model, log, "--content")
    assert ran.code == 130
    assert "interrupted" in ran.err
    assert str(log) in ran.err
    with open_log(log) as tape:
        assert tape.sealed
        events = tape.events(tape.default_run().run_id, "main")
    assert [str(e.op) for e in events][-2:] == ["refuse", "close"]
    assert sum(e.n_tokens or 0 for e in events if e.op == "decode") == 4
    assert kvtape("verify", log).code == 0


@pytest.mark.parametrize("method", ["__init__", "seal"])
def test_ctrl_c_while_the_log_is_made_or_sealed_waits(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    log = tmp_path / "a.duckdb"
    original, before = getattr(Recorder, method), signal.getsignal(signal.SIGINT)

    def interrupted(self: Recorder, *args: object, **more: object) -> None:
        signal.raise_signal(signal.SIGINT)
        original(self, *args, **more)

    monkeypatch.setattr(Recorder, method, interrupted)
    ran = record(model, log)
    assert ran.code == 130
    assert "is sealed" in ran.err
    assert signal.getsignal(signal.SIGINT) is before
    with open_log(log) as tape:
        assert tape.sealed
    assert kvtape("verify", log).code == 0


def test_ctrl_c_on_a_real_process(tmp_path: Path) -> None:
    """From outside, in the middle of a long prefill in small chunks."""
    model = write_tiny(tmp_path / "tiny.gguf", n_ctx=65536)
    source, log = tmp_path / "text.txt", tmp_path / "a.duckdb"
    source.write_text(TEXT * 100, encoding="utf-8")
    process = subprocess.Popen(
        small_chunks(model, source, log),
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and process.poll() is None and not log.with_name("a.duckdb.head.json").exists():
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert b"interrupted" in err
    assert b"Traceback" not in err
    assert kvtape("verify", log).code == 0


def test_a_full_disk_is_exit_3_and_what_was_acknowledged_stays(model: Path, tmp_path: Path) -> None:
    """A limit on file size stands for the disk: it needs no privilege and fails the same write."""
    source, log = tmp_path / "text.txt", tmp_path / "a.duckdb"
    source.write_text(TEXT * 20, encoding="utf-8")

    def small_files() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (800_000, 800_000))

    done = subprocess.run(
        small_chunks(model, source, log),
        capture_output=True,
        text=True,
        preexec_fn=small_files,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert done.stderr.count("\n") == 1
    assert "acknowledged events are safe" in done.stderr
    assert os.strerror(errno.EFBIG).split()[0] in done.stderr or "writing failed" in done.stderr
    assert kvtape("verify", log).code == 0
    assert kvtape("show", log).code == 0


def test_what_was_recorded_before_an_error_stays(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise RuntimeError("something else")

    monkeypatch.setattr(Session, "decode", fails)
    log = tmp_path / "a.duckdb"
    ran = record(model, log)
    assert ran.code == 1
    assert "internal error, RuntimeError: something else" in ran.err
    assert kvtape("verify", log).code == 0


def test_the_run_is_named_by_its_configuration_and_its_prompt(model: Path, tmp_path: Path) -> None:
    texts = {"a": TEXT, "b": TEXT, "c": TEXT + "x", "other/a": TEXT}
    (tmp_path / "other").mkdir()
    ids = {}
    for name, text in texts.items():
        path = tmp_path / f"{name}.duckdb"
        assert record(model, path, text=text).code == 0
        with open_log(path) as tape:
            ids[name] = tape.default_run().run_id
    assert ids["a"] == ids["b"] != ids["c"]
    assert ids["other/a"] != ids["a"], "under another folder's key: an id tells nothing of what was said"
    path = tmp_path / "d.duckdb"
    assert record(model, path, "--threads", 2).code == 0
    with open_log(path) as tape:
        assert tape.default_run().run_id not in ids.values()


def test_what_the_session_would_refuse_leaves_no_log(tmp_path: Path) -> None:
    """A YaRN model cannot be shifted: known once the context is there, and still before the log is."""
    yarn = write_tiny(tmp_path / "yarn.gguf", yarn=4)
    log = tmp_path / "a.duckdb"
    ran = record(yarn, log, "--policy", "stream:sink=4,recent=60,positions=rebased", "--cold-tokens", 0)
    assert ran.code == 2
    assert "positions=rebased on llama is not possible here" in ran.err
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("a.duckdb")] == []


def test_the_cold_store_can_be_bound_in_bytes(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "a.duckdb"
    assert record(model, log, "--cold-bytes", 60_000).code == 0
    with open_log(log) as tape:
        (row,) = tape.sessions(tape.default_run().run_id)
        events = tape.events(row.run_id, "main")
    assert (row.cold_budget_tokens, row.cold_budget_bytes) == (128, 60_000)
    assert any(e.op == "trim" for e in events)
    ran = record(model, tmp_path / "b.duckdb", "--cold-bytes", 1000, "--cold-tokens", 0)
    assert (ran.code, "cold_budget_bytes without cold_budget_tokens" in ran.err) == (2, True)
    assert not (tmp_path / "b.duckdb").exists()


def test_storage_and_flash_attention_are_asked_for_and_what_ran_is_on_record(tmp_path: Path) -> None:
    wide = write_tiny(tmp_path / "wide.gguf", "llama", n_embd=128, n_head=2, n_head_kv=1, head_dim=64)
    log = tmp_path / "a.duckdb"
    asked = ("--kv-type", "q8_0/q4_0", "--flash", "auto")
    ran = record(wide, log, *asked, "--uncertified", "--json")
    assert ran.code == 0, ran.err
    with open_log(log) as tape:
        run = tape.default_run()
        row = tape.session(run.run_id, "main")
    assert (row.kv_type_k, row.kv_type_v, row.flash_attention) == ("q8_0", "q4_0", True)
    config = json.loads(run.config)
    assert (config["kv_type"], config["flash"], config["uncertified"]) == ("q8_0/q4_0", "auto", True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--kv-type", "q8_0/"], "write a type, or those of keys and values as K/V"),
        (["--kv-type", "q9"], "kv_type_k q9: this backend opens bf16, f16"),
        (["--kv-type", "q8_0"], "ask for flash attention on or auto"),
        (["--flash", "yes"], "it must be one of off, on, auto"),
    ],
)
def test_a_storage_that_cannot_be_leaves_no_log(model: Path, tmp_path: Path, options: list[str], words: str) -> None:
    log = tmp_path / "a.duckdb"
    ran = record(model, log, *options)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert not log.exists()
