"""Completion of the command line: what is offered, what the registries hold, and real shells on a terminal."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import typer

from kvtape.cli.app import app
from kvtape.cli.completion import SHELLS, answer, candidates
from kvtape.cli.completion_scripts import SCRIPTS
from kvtape.cli.completion_values import (
    BACKENDS,
    CAPACITY_ENGINES,
    EXPORTS,
    IMPORTS,
    KV_ENGINES,
    KV_TYPES,
    SPECULATIONS,
    WORDS,
)
from support.command import kvtape, kvtape_process
from support.terminal import Terminal

ROOT = typer.main.get_command(app)


def offered(line: str) -> list[str]:
    """For a line behind `kvtape `; a space at its end begins a new word."""
    return [word for word, _ in candidates(ROOT, line.split(" "))]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("rec", ["record"]),
        ("models a", ["add"]),
        ("--vers", ["--version"]),
        ("record --pol", ["--policy"]),
        ("record --policy none --pol", []),
        ("whatif L --policy none --pol", ["--policy"]),
        ("record --policy str", ["stream:"]),
        ("record --policy stream:si", ["stream:sink="]),
        ("record --policy stream:sink=4,re", ["stream:sink=4,recent="]),
        ("record --policy class:hole=", ["class:hole=forget", "class:hole=refill"]),
        ("record --policy stream:split=y", ["stream:split=yes"]),
        ("record --policy=tov", ["--policy=tova:"]),
        ("record --backend op", ["openvino"]),
        ("replay L --on llama:w", ["llama:way="]),
        ("curve L --policy s", ["s3fifo", "sieve"]),
        ("run --engine no", ["no-cache"]),
        ("export L --format p", ["parquet", "perfetto"]),
        ("import F --format moo", ["mooncake"]),
        ("gate --flash o", ["on", "off"]),
        ("--shell f", ["fish"]),
        ("capacity --engine o", ["openvino", "openvino-cb"]),
        ("record --kv-type q8", ["q8_0"]),
        ("record --kv-type q8_0/i", ["q8_0/iq4_nl"]),
        ("record --speculate dr", ["draft:"]),
        ("record --speculate draft:m", ["draft:model="]),
        ("record --n-ctx ", []),
        ("verify --js", ["--json"]),
        ("verify -- --js", []),
        ("verify some.duck", []),
    ],
)
def test_what_is_offered(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_verbs_and_options_are_those_of_the_help() -> None:
    assert offered("") == list(ROOT.commands)  # type: ignore[attr-defined]
    shown = kvtape("replay", "--help").out
    listed = [line.strip().removeprefix("-h, ").split()[0] for line in shown.splitlines() if line.startswith("  -")]
    assert offered("replay --") == listed


def test_names_are_those_of_the_registries() -> None:
    from kvtape.backends.llama.kv_types import GGML_TYPES
    from kvtape.backends.reference.engines.registry import engine_entries
    from kvtape.backends.registry import ENGINE_NAMES
    from kvtape.backends.speculation.spec import OPTIONS
    from kvtape.capacity.engines import ENGINES
    from kvtape.traces.exporters import exporting
    from kvtape.traces.importers import registry

    assert BACKENDS == ENGINE_NAMES
    assert CAPACITY_ENGINES == ENGINES
    assert set(KV_TYPES) == {*GGML_TYPES, "u8"}
    assert {name: tuple(options) for name, options in OPTIONS.items()} == SPECULATIONS
    assert list(KV_ENGINES) == [entry.name for entry in engine_entries()]
    assert list(IMPORTS) == [registry.AUTO, *registry.format_names()]
    assert list(EXPORTS) == exporting.format_names()


@pytest.mark.parametrize("option", sorted(WORDS))
def test_every_option_with_words_is_there(option: str) -> None:
    commands = ROOT.commands.values()  # type: ignore[attr-defined]
    assert any(option in p.opts for command in commands for p in command.params)


def test_sessions_and_runs_come_from_the_head_of_a_log(log: Path, tmp_path: Path) -> None:
    assert offered(f"show {log} --session ") == ["main"]
    [run] = offered(f"export {log} --run ")
    assert run in kvtape("sql", log, "SELECT run_id FROM runs").out
    head = tmp_path / "odd.duckdb.head.json"
    head.write_text(json.dumps({"sessions": {"r/fine": 1, "r/$(reboot)": 1, "r/`x`": 2, "r/a b": 3}}))
    assert offered(f"show {tmp_path / 'odd.duckdb'} --session ") == ["fine"]
    assert offered(f"show {tmp_path} --session ") == ["fine"]
    head.write_text("{")
    assert offered(f"show {tmp_path / 'odd.duckdb'} --session ") == []


def test_bash_gets_the_part_behind_its_last_break() -> None:
    assert answer("bash", ROOT, ["record", "--policy", "stream", ":", "si"]) == "sink=\n"
    assert answer("bash", ROOT, ["record", "--policy", "=", "tov"]) == "tova:\n"
    assert answer("bash", ROOT, ["rec"]) == "record \n"
    assert answer("fish", ROOT, ["sho"]).startswith("show\tShow the state")
    assert answer("zsh", ROOT, ["record", "--policy", "str"]) == "stream:\t\n"


def test_asking_is_quick_because_nothing_heavy_is_loaded() -> None:
    heavy = ("duckdb", "pyarrow", "pydantic", "numpy", "rich", "llama_cpp", "openvino", "gguf")
    code = (
        "import sys\nfrom kvtape.cli import main\nmain(sys.argv[1:])\n"
        f"print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    import subprocess

    for words in (["record", "--policy", "stream:"], ["run", "--engine", ""], ["import", "--format", ""]):
        done = subprocess.run(
            [sys.executable, "-c", code, *words],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "KVTAPE_COMPLETE": "zsh"},
        )
        assert done.stdout
        assert done.stderr.strip() == "[]"


def test_an_unknown_shell_is_one_line() -> None:
    ran = kvtape_process(["rec"], KVTAPE_COMPLETE="csh")
    assert (ran.code, ran.out) == (2, "")
    assert "unset it" in ran.err
    ran = kvtape("--show-completion", "--shell", "fsh")
    assert ran.code == 2
    assert "did you mean 'fish'?" in ran.err


def test_the_script_that_is_shown_is_the_one_that_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(SCRIPTS) == set(SHELLS)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    for shell in SCRIPTS:
        ran = kvtape("--install-completion", "--shell", shell)
        assert ran.code == 0, ran.err
        place = Path(ran.out.split(" is written")[0])
        assert place.is_relative_to(tmp_path)
        assert place.read_text() == SCRIPTS[shell] == kvtape("--shell", shell, "--show-completion").out


@pytest.mark.parametrize("shell", ["bash", *(shell for shell in ("fish", "zsh") if shutil.which(shell))])
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    """Of zsh and fish where they are found; continuous integration installs both."""
    programs = tmp_path / "bin"
    programs.mkdir()
    program = programs / "kvtape"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m kvtape.cli "$@"\n')
    program.chmod(0o755)
    home = tmp_path / "home"
    (home / ".config" / "fish" / "completions").mkdir(parents=True)
    (home / ".bashrc").write_text(f"{SCRIPTS['bash']}\nPS1='$ '\n")
    (home / ".zshrc").write_text(f"autoload -Uz compinit; compinit -u\n{SCRIPTS['zsh']}\nPS1='$ '\n")
    (home / ".config" / "fish" / "completions" / "kvtape.fish").write_text(SCRIPTS["fish"])
    environment = {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}", "XDG_CONFIG_HOME": ""}
    with Terminal(
        ["-c", f"import os; os.execvp({shell!r}, [{shell!r}, '-i'])"], columns=150, **environment
    ) as terminal:
        for keys, wanted in [
            ("kvtape rec\t", "record"),
            ("--pol\t", "--policy"),
            ("str\t", "stream:"),
            ("si\t", "sink="),
            ("4,rec\t", "recent="),
        ]:
            terminal.press(keys)
            terminal.until(lambda seen, wanted=wanted: wanted in seen)  # type: ignore[misc]
