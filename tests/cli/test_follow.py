"""`kvtape import --follow` as a process: signals, a killed follower, readers meanwhile, and what it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtape.cli.following import stopping
from support.command import kvtape, kvtape_process


def request(task: int, n: int) -> bytes:
    """What a server says of one request that is computed whole."""
    slot = f"slot update_slots: id  0 | task {task} | "
    lines = [
        f"slot launch_slot_: id  0 | task {task} | processing task",
        slot + f"new prompt, n_ctx_slot = 4096, n_keep = 0, task.n_tokens = {n}",
        slot + "n_tokens = 0, memory_seq_rm [0, end)",
        slot + f"prompt done, n_tokens = {n}, batch.n_tokens = {n}",
        f"slot      release: id  0 | task {task} | stop processing: n_tokens = {n + 4}, truncated = 0",
        "srv  update_slots: all slots are idle",
    ]
    return "".join(line + "\n" for line in lines).encode()


@contextmanager
def following(*args: object, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "kvtape.cli", "import", "--follow", *map(str, args), "--format", "llama-server"]
    process = subprocess.Popen(
        [*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}, **options
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(found: Callable[[], bool]) -> None:
    for _ in range(600):
        if found():
            return
        time.sleep(0.1)
    raise AssertionError("it did not come to that in a minute")


def prompts(log: Path) -> int:
    """As another process sees it, while the log is written."""
    ran = kvtape("sql", log, "SELECT count(*) AS n FROM events WHERE op = 'prompt'", "--json")
    return int(json.loads(ran.out)["rows"][0]["n"]) if ran.code == 0 else 0


def test_killed_begun_again_and_ended_by_a_signal_it_is_the_import_of_the_whole_file(tmp_path: Path) -> None:
    file, log = tmp_path / "server.log", tmp_path / "log.duckdb"
    with following(file, "--log", log) as process:
        file.write_bytes(request(1, 20))
        until(lambda: prompts(log) == 1)
        process.kill()
        process.communicate()
    with following(file, "--log", log) as process:
        with file.open("ab") as handle:
            handle.write(request(2, 30))
        until(lambda: prompts(log) == 2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert f"{log} goes on where it stopped" in err.decode()
    assert "Ctrl-C ends it and seals the log" in err.decode()
    body = json.loads(out)
    assert {k: body[k] for k in ("rows", "events", "resent_events", "sessions", "sealed")} == {
        "rows": 10,
        "events": 6,
        "resent_events": 5,
        "sessions": 1,
        "sealed": True,
    }
    assert json.loads(kvtape("verify", log, "--json").out)["ok"]
    whole = kvtape("import", file, "--log", tmp_path / "whole.duckdb", "--json")
    assert json.loads(whole.out)["digest"] == body["digest"]


def test_the_first_signal_asks_and_wakes_and_then_they_do_what_they_did() -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with stopping() as pace:
        before = pace.now_ns()
        os.kill(os.getpid(), signal.SIGINT)
        pace.pause(60)
        assert pace.stopped
        assert pace.now_ns() - before < 30 * 10**9
        assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_pipe_ends_it(tmp_path: Path) -> None:
    args = ["import", "--follow", "-", "--log", tmp_path / "log.duckdb", "--format", "llama-server", "--json"]
    ran = kvtape_process(args, stdin=request(1, 20) + request(2, 30)[:-1])
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["rows"] == 10


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--follow", "a", "b", "--format", "llama-server"], "--follow takes one file, not 2"),
        (["--follow", "a", "--format", "mooncake"], "mooncake does not grow; --follow takes --format"),
        (["--follow", "a"], "not recognised by its beginning"),
        (["--follow", "a", "--format", "llama-server", "--block-tokens", "8"], "files that can be looked at whole"),
        (["a", "--wait", "1"], "--wait and --until-quiet go with --follow"),
        (["--follow", "none", "--format", "llama-server", "--wait", "0"], "none: no such file after 0 s; look at"),
    ],
)
def test_usage_is_exit_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: list[str], words: str) -> None:
    monkeypatch.chdir(tmp_path)
    ran = kvtape("import", *args, "--log", "log.duckdb")
    assert (ran.code, words in ran.err, list(tmp_path.iterdir())) == (2, True, []), ran.err
