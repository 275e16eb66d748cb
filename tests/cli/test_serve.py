"""`kvtape serve` as a process: it starts, answers, is read while it runs, and ends with a sealed log."""

from __future__ import annotations

import json
import os
import re
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from support.command import kvtape
from support.llama_tiny import model_file


@contextmanager
def serving(log: Path, *more: str, file_bytes: int | None = None) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address and the process; killed at the end unless it has ended. `file_bytes`: how large a file may grow."""
    command = [sys.executable, "-m", "kvtape.cli", "serve", "--model", str(model_file()), "--n-ctx", "512"]
    command += ["--port", "0", "--log", str(log), "--name", "tiny", *more]

    def small_disk() -> None:
        if file_bytes is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))

    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=small_disk) as server:
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
        (["--memory", "9KiB"], "memory of 9.00 KiB leaves 0 B"),
        (["--memory", "9KiB", "--slots", "3"], "the smallest context of 3 slots; give at least"),
        (["--name", ""], "--name is empty"),
        (["--log", "none/such/tapes"], "none/such: no such folder; create it first"),
        (["--chat-template", "/none"], "chat template"),
        (["--api-key-file", "/none"], "cannot be read"),
        (["--kv-type", "q4_0", "--flash", "on"], "uncertified"),
        (["--kv-type", "nothing"], "nothing"),
        (["--flash", "maybe"], "flash"),
        (["--policy", "stream:sink=4,recent=60000"], "context"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_no_log(tmp_path: Path, args: list[str], words: str) -> None:
    log = tmp_path / "tapes"
    done = kvtape("serve", "--model", str(model_file()), "--log", str(log), "--port", "0", *args)
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert not log.exists()


def test_the_memory_that_is_named_for_all_slots_is_enough(tmp_path: Path) -> None:
    command = ("serve", "--model", str(model_file()), "--log", str(tmp_path / "tapes"), "--slots", "3", "--memory")
    told = re.search(r"at least ([0-9.]+) (KiB|MiB)", kvtape(*command, "9KiB", "--port", "0").err)
    assert told
    number, unit = told.groups()
    with socket.socket() as taken:  # so that a server that fits ends there
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert "choose another --port" in kvtape(*command, f"{number}{unit}", "--port", port).err
        assert "at least" in kvtape(*command, f"{float(number) - 0.02:.2f}{unit}", "--port", port).err


def test_a_context_beyond_the_trained_one_is_not_promised(tmp_path: Path) -> None:
    with serving(tmp_path / "tapes", "--n-ctx", "5000") as (url, server):
        (card,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert card["max_model_len"] == 4096
        answer = httpx.post(f"{url}/v1/completions", json={**LONG, "stream": False}, timeout=60).json()
        assert answer["usage"]["total_tokens"] == 4096
        server.send_signal(signal.SIGTERM)
        assert server.stderr is not None
        assert "trained for 4096 tokens; of --n-ctx 5000" in server.stderr.read()


def test_a_port_that_is_taken_is_known_before_the_log(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = kvtape("serve", "--model", str(model_file()), "--log", str(tmp_path / "tapes"), "--port", port)
    assert done.code == 3
    assert "choose another --port" in done.err
    assert not (tmp_path / "tapes").exists()


LONG = {"model": "tiny", "prompt": [34] * 9, "max_tokens": 8000, "temperature": 0, "stream": True}
"""As many tokens as it was trained for, 4096, which takes some seconds: it does not come to an end by itself."""


def await_closed(url: str) -> None:
    """Until the server takes no more connections: it has understood that it is to end."""
    host, port = url.removeprefix("http://").split(":")
    for _ in range(2000):
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.005)
    raise AssertionError("the server still takes connections")


def test_a_second_signal_cancels_what_runs(tmp_path: Path) -> None:
    log = tmp_path / "tapes"
    with serving(log, "--n-ctx", "4096", "--grace", "300") as (url, server):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            await_closed(url)
            server.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert server.wait(20) == 0
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert json.loads(kvtape("verify", str(log), "--json").out)["ok"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["term", "int"])
def test_signals_while_the_log_is_sealed_do_not_end_that(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path / "tapes") as (url, server):
        say(url)
        assert server.stderr is not None
        # Until it says so, or is gone.
        while not select.select([server.stderr], [], [], 0.002)[0]:
            server.send_signal(number)
        assert "is sealed" in server.stderr.read()


def host_of(server: subprocess.Popen[str]) -> int:
    children = (Path("/proc") / str(server.pid)).glob("task/*/children")
    (host,) = {int(pid) for file in children for pid in file.read_text().split()}
    return host


def test_an_engine_that_hangs_does_not_keep_the_server_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "tapes"
    with serving(log, "--n-ctx", "4096", "--isolate", "--grace", "0.5") as (url, server):
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(host_of(server), signal.SIGSTOP)
            server.send_signal(signal.SIGTERM)
            last = [line for line in lines if line][-1]
        assert server.wait(20) == 0
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
    assert json.loads(kvtape("verify", str(log), "--json").out)["ok"]


def test_an_engine_host_that_is_killed_takes_one_request_with_it(tmp_path: Path) -> None:
    log = tmp_path / "tapes"
    with serving(log, "--n-ctx", "4096", "--isolate") as (url, server):
        whole = say(url)
        with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(host_of(server), signal.SIGKILL)
            last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert say(url) == whole
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    fatal = kvtape("sql", str(log), "SELECT count(*) AS n FROM events WHERE op = 'fatal'", "--json")
    assert json.loads(fatal.out)["rows"] == [{"n": 1}]


def test_two_servers_share_a_folder_and_the_numbers_add_up(tmp_path: Path) -> None:
    log = tmp_path / "tapes"
    with serving(log) as (one, first), serving(log) as (two, second):
        assert [say(one), say(two), say(one)].count(say(two)) == 3
        told = [httpx.get(f"{url}/metrics").text for url in (one, two)]
        for server in (first, second):
            server.send_signal(signal.SIGTERM)
            assert server.wait(20) == 0

    def counted(name: str) -> int:
        found = [re.search(rf"^kvtape:{name}_total{{.*}} (\S+)$", text, re.MULTILINE) for text in told]
        return sum(int(float(f.group(1))) for f in found if f)

    sums = "sum(completion_tokens) AS generated_tokens, sum(reused) AS reused_tokens"
    sums += ", sum(n_tokens) FILTER (op = 'prompt') AS prompt_tokens, sum(physical_prefill_tokens) AS prefilled_tokens"
    (row,) = json.loads(kvtape("sql", str(log), f"SELECT {sums} FROM events", "--json").out)["rows"]
    assert {name: int(n) for name, n in row.items()} == {name: counted(name) for name in row}


def test_a_disk_that_is_full_ends_the_server_and_nothing_told_is_lost(tmp_path: Path) -> None:
    log = tmp_path / "tapes"
    told = 0
    with serving(log, file_bytes=560_000) as (url, server), httpx.Client() as client:
        for i in range(400):
            body = {"model": "tiny", "prompt": [7 + i % 99] * 100, "max_tokens": 4, "temperature": 0}
            answer = client.post(f"{url}/v1/completions", json=body, timeout=30)
            if answer.status_code != 200:
                break
            told += answer.json()["usage"]["completion_tokens"]
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "unavailable"
        assert "File too large" not in answer.text
        assert server.wait(20) == 3
        assert server.stderr is not None
        assert "make room" in server.stderr.read()
    (row,) = json.loads(kvtape("sql", str(log), "SELECT sum(completion_tokens) AS n FROM events", "--json").out)["rows"]
    assert row["n"] >= told > 0


def test_a_log_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = kvtape("serve", "--model", str(model_file()), "--log", str(tmp_path / "file"))
    assert done.code == 2
    assert "give a folder" in done.err
