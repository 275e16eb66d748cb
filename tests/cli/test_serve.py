"""`kvtape serve` as a process: it starts, answers, is read while it runs, and ends with a sealed log."""

from __future__ import annotations

import json
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from support.command import kvtape
from support.llama_tiny import model_file


@contextmanager
def serving(log: Path, *more: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process; killed at the end unless it has ended."""
    command = [sys.executable, "-m", "kvtape.cli", "serve", "--model", str(model_file()), "--n-ctx", "512"]
    command += ["--port", "0", "--log", str(log), "--name", "tiny", *more]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            line = server.stderr.readline()
            found = re.search(r"http://\S+?(?=,)", line)
            assert found, line + server.stderr.read()
            yield found.group(), server
        finally:
            server.kill()


def say(url: str, n: int = 5) -> str:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    told = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], max_tokens=n, temperature=0
    )
    return told.choices[0].message.content or ""


def test_it_answers_is_read_live_and_seals_its_log(tmp_path: Path) -> None:
    log = tmp_path / "tapes"
    with serving(log) as (url, server):
        first = say(url)
        assert stat.S_IMODE(log.stat().st_mode) == 0o700
        live = kvtape("sql", str(log), "SELECT count(*) AS n FROM events WHERE op = 'decode'", "--json")
        assert json.loads(live.out)["rows"] == [{"n": 1}]
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert server.stderr is not None
        assert "is sealed" in server.stderr.read()
    with serving(log) as (url, server):
        assert say(url) == first
        server.send_signal(signal.SIGINT)
        assert server.wait(20) == 0
    told = json.loads(kvtape("verify", str(log), "--json").out)
    assert told["ok"]
    runs = kvtape("sql", str(log), "SELECT count(DISTINCT run_id) AS n FROM events", "--json")
    assert json.loads(runs.out)["rows"] == [{"n": 2}]
    tokens = kvtape("sql", str(log), "SELECT count(*) AS n FROM tokens WHERE tokens IS NOT NULL", "--json")
    assert json.loads(tokens.out)["rows"] == [{"n": 0}]


def test_what_was_told_is_in_the_log_of_a_server_that_was_killed(tmp_path: Path) -> None:
    log = tmp_path / "tapes"
    with serving(log, "--content") as (url, server):
        said = say(url, 7)
        server.kill()
        server.wait(20)
    told = kvtape("sql", str(log), "SELECT sum(completion_tokens) AS n FROM events", "--json")
    assert json.loads(told.out)["rows"] == [{"n": 7}]
    assert said


def test_a_running_answer_is_finished_before_the_end(tmp_path: Path) -> None:
    with serving(tmp_path / "tapes", "--n-ctx", "4096") as (url, server):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1500, "temperature": 0}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.wait(20) == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--policy", "stream:sink=4"], "stream"),
        (["--host", "0.0.0.0"], "--api-key-file"),
        (["--backend", "nothing"], "unknown backend"),
        (["--memory", "much"], "--memory much"),
        (["--chat-template", "/none"], "chat template"),
        (["--api-key-file", "/none"], "cannot be read"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_no_log(tmp_path: Path, args: list[str], words: str) -> None:
    log = tmp_path / "tapes"
    done = kvtape("serve", "--model", str(model_file()), "--log", str(log), "--port", "0", *args)
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not log.exists()


def test_a_log_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = kvtape("serve", "--model", str(model_file()), "--log", str(tmp_path / "file"))
    assert done.code == 2
    assert "give a folder" in done.err
