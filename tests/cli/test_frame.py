"""What every command shares: help, usage errors, JSON, plain output, closed pipes, tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvtape.cli import app as frame
from kvtape.cli.output import Section, canonical_json, emit, report_digest
from support.command import kvtape, kvtape_process

VERBS = ["demo", "diff", "doctor", "record", "replay", "show", "sql", "verify"]


def test_help_names_every_verb() -> None:
    ran = kvtape("--help")
    assert ran.code == 0
    for verb in VERBS:
        assert f"\n  {verb} " in ran.out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_json(verb: str) -> None:
    ran = kvtape(verb, "--help")
    assert ran.code == 0
    assert "--json" in ran.out


def test_without_a_verb_the_help_is_shown() -> None:
    ran = kvtape()
    assert (ran.code, ran.err) == (0, "")
    assert "Commands:" in ran.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["shwo"], "Did you mean 'show'"),
        (["show", "x", "--jsn"], "--json"),
        (["record"], "--log"),
        (["replay"], "LOG"),
        (["replay", "x"], "--on"),
        (["show", "x", "--at", "minus"], "--at"),
        (["--nonsense"], "--nonsense"),
        (["--policy", "none", "record"], "--policy before the verb; it stands behind record, simulate"),
        (["verify", "x", "--on", "llama"], "--on here; replay has it"),
        (["verify", "x", "--costs", "c"], "--costs here; simulate, whatif, tune, fleet have it"),
    ],
)
def test_a_usage_error_is_one_line_with_a_remedy(args: list[str], words: str) -> None:
    ran = kvtape(*args)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("kvtape: ")
    assert words in ran.err
    assert "--help)" in ran.err


def test_version() -> None:
    ran = kvtape("--version")
    assert ran.code == 0
    assert ran.out.split()[0] == "kvtape"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_debug_goes_anywhere_and_shows_the_traceback(place: int, tmp_path: Path) -> None:
    args = ["verify", str(tmp_path / "none.duckdb")]
    assert "Traceback" not in kvtape(*args).err
    args.insert(place, "--debug")
    ran = kvtape(*args)
    assert ran.code == 2
    assert "Traceback" in ran.err


def test_debug_behind_a_double_dash_is_an_argument() -> None:
    assert frame._take_debug(["sql", "--", "--debug"]) == (["sql", "--", "--debug"], False)
    assert frame._take_debug(["--debug", "sql", "--", "--debug"]) == (["sql", "--", "--debug"], True)


def test_an_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvtape.cli.app._tree", interrupted)
    ran = kvtape("doctor")
    assert (ran.code, ran.err) == (130, "kvtape: interrupted\n")


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m kvtape.cli record --help | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_loads_nothing_heavy() -> None:
    heavy = ("duckdb", "pyarrow", "pydantic", "numpy", "rich", "llama_cpp", "openvino", "gguf")
    code = (
        "import sys\nfrom kvtape.cli import main\nmain(['--help'])\n"
        f"print([m for m in {heavy} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_json_is_sorted_exact_and_names_its_digest(capsys: pytest.CaptureFixture[str]) -> None:
    body = {"largest": 2**64 - 1, "a": [1, None, "ü"]}
    emit("thing", body, [], as_json=True)
    text = capsys.readouterr().out
    value = json.loads(text)
    assert value["largest"] == 18446744073709551615
    assert list(value) == sorted(value)
    assert value["schema"] == "kvtape.thing/1"
    assert value["kvtape_version"]
    assert (value["digest"], value["digest_kind"]) == (report_digest(body), "report")


def test_a_pipe_gets_tab_separated_lines(capsys: pytest.CaptureFixture[str]) -> None:
    emit("thing", {}, [Section("title", ("a", "b"), [(1, None), (0.5, "x\ty")])], as_json=False, digest="d")
    printed = capsys.readouterr()
    assert printed.out == "# title\na\tb\n1\t-\n0.5\tx y\n"
    assert printed.err == "report digest d\n"


def test_canonical_json_refuses_what_json_has_no_word_for() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        canonical_json({"x": float("nan")})


def test_module_entry_is_the_console_script() -> None:
    assert kvtape_process(["--version"]).out == kvtape("--version").out


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("record --n-ctx", "Option '--n-ctx' requires an argument (see kvtape record --help)"),
        ("models add --role", "Option '--role' requires an argument (see kvtape models add --help)"),
        ("--shell", "Option '--shell' requires an argument (see kvtape --help)"),
        ("record --polcy x", "no such option: --polcy; did you mean --policy? (see kvtape record --help)"),
        (
            "curve L --pace 2",
            "no such option: --pace here; simulate, whatif, tune, fleet have it (see kvtape curve --help)",
        ),
        ("models ad", "No such command 'ad'. Did you mean 'add'? (see kvtape models --help)"),
    ],
)
def test_a_line_that_is_not_understood_names_the_nearest_and_its_help(line: str, said: str) -> None:
    ran = kvtape(*line.split())
    assert (ran.code, ran.out, ran.err) == (2, "", f"kvtape: {said}\n")
