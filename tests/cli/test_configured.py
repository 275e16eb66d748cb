"""`--print-config` and `--config`: flags and file say the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtape.cli.app import app
from support.command import kvtape, kvtape_process

NEEDED = {
    "record": ["--log", "l"],
    "replay": ["l", "--on", "llama"],
    "capacity": [],
    "certify": ["--backend", "llama"],
    "calibrate": [],
    "simulate": ["l", "--costs", "c"],
    "whatif": ["l", "--costs", "c", "--policy", "none", "--policy", "class:budget=8"],
    "tune": ["l", "--costs", "c"],
    "curve": ["l"],
    "fleet": ["l", "--costs", "c", "--pool-blocks", "9"],
    "run": [],
    "bench": [],
    "ffn-server": [],
    "serve": ["--log", "d", "--slots", "2", "--timeout", "1.5"],
    "eval": [],
    "gate": [],
    "import": ["a", "b", "--log", "l"],
    "export": ["l", "--format", "jsonl", "--out", "o"],
}


def printed(*args: object) -> dict[str, object]:
    ran = kvtape(*args, "--print-config")
    assert ran.code == 0, ran.err
    options: dict[str, object] = json.loads(ran.out)["options"]
    return options


def test_every_verb_that_computes_has_both() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert set(NEEDED) == {name for name, c in commands.items() if any("--config" in p.opts for p in c.params)}


@pytest.mark.parametrize("verb", sorted(NEEDED))
def test_a_file_says_what_the_line_said(verb: str, tmp_path: Path) -> None:
    ran = kvtape(verb, *NEEDED[verb], "--print-config")
    assert ran.code == 0, ran.err
    body = json.loads(ran.out)
    assert (body["schema"], body["verb"]) == ("kvtape.config/1", verb)
    file = tmp_path / "config.json"
    file.write_text(ran.out)
    again = kvtape(verb, "--config", file, "--print-config")
    assert (again.code, again.out) == (0, ran.out), again.err


@settings(max_examples=25)
@given(
    st.fixed_dictionaries(
        {"log": st.text("ab/.", min_size=1)},
        optional={
            "n-ctx": st.integers(2, 10**6),
            "policy": st.sampled_from(["none", "stream:sink=4,recent=8"]),
            "content": st.booleans(),
            "score-all": st.booleans(),
            "threads": st.integers(1, 64),
            "text": st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1).filter(
                lambda t: not t.startswith("-")
            ),
        },
    )
)
def test_any_options_come_back(options: dict[str, object]) -> None:
    line = []
    for name, value in options.items():
        line += ([f"--{name}"] if value else []) if isinstance(value, bool) else [f"--{name}={value}"]
    on_the_line = printed("record", *line)
    assert {name: on_the_line[name] for name in options if name != "log"} == {
        name: value for name, value in options.items() if name != "log"
    }
    ran = kvtape_with_file({"options": options})
    assert ran == on_the_line


def kvtape_with_file(body: object) -> object:
    import tempfile

    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(body, file)
        file.flush()
        return printed("record", "--config", file.name)


def test_a_number_in_a_file_is_read_as_on_the_line(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"options": {"log": 5, "n-ctx": "64", "text": 1.5}}))
    assert printed("record", "--config", file) == printed("record", "--log", "5", "--n-ctx", "64", "--text", "1.5")


@pytest.mark.parametrize("given", [["whatif", "--pace"], ["serve", "--grace"], ["curve", "--warmup"]])
def test_an_endless_number_is_refused(given: list[str]) -> None:
    ran = kvtape(*given, "inf", *NEEDED[given[0]])
    assert (ran.code, ran.out) == (2, "")
    assert f"{given[1]} inf: give a finite number" in ran.err


def test_the_line_goes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"options": {"log": "l", "n-ctx": 64, "threads": 3, "deadline": None}}))
    found = printed("record", "--n-ctx", "128", "--config", file)
    assert (found["log"], found["n-ctx"], found["threads"]) == ("l", 128, 3)
    ran = kvtape_process(["record", "--config", "-", "--print-config"], stdin=file.read_bytes())
    assert json.loads(ran.out)["options"]["n-ctx"] == 64


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["no JSON", "--print-config shows the form"]),
        ("[]", ["options are missing"]),
        ('{"n-ctx": 5}', ["options are missing"]),
        ('{"options": {}, "optoins": {}}', ["unknown key", "did you mean 'options'?"]),
        ('{"options": {"polcy": "none"}}', ["unknown option of kvtape record", "did you mean 'policy'?"]),
        ('{"options": {"log": "a", "log": "b"}}', ["log is there twice"]),
        ('{"options": {"log": ["a"]}}', ["options.log is to be one text or number"]),
        ('{"options": {"log": {"a": 1}}}', ["options.log is to be one text"]),
        ('{"options": {"log": true}}', ["options.log is to be one text"]),
        ('{"options": {"log": "\\ud800"}}', ["options.log is to be one text"]),
        ('{"options": {"content": "maybe"}}', ["options.content is to be true or false"]),
        ('{"options": {"log": "l", "deadline": 1e400}}', ["--deadline inf", "finite"]),
        ("", ["no JSON"]),
        ("[" * 100_000, ["no JSON"]),
        ('{"options": {"log": "l", "n-ctx": "many"}}', ["'--n-ctx'", "valid integer"]),
        ('{"options": {}, "verb": "whatif"}', ["a configuration of kvtape whatif, not of kvtape record"]),
        ('{"options": {}, "schema": "kvtape.config/9"}', ["this kvtape reads kvtape.config/1"]),
    ],
)
def test_what_is_no_configuration_is_one_line_that_names_the_file(text: str, words: list[str], tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    file.write_text(text)
    ran = kvtape("record", "--config", file)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert str(file) in ran.err
    for word in words:
        assert word in ran.err


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    ran = kvtape("record", "--config", tmp_path / "none.json")
    assert ran.code == 2
    assert "none.json" in ran.err


def test_printing_runs_nothing(tmp_path: Path) -> None:
    log = tmp_path / "l.duckdb"
    printed("record", "--log", log)
    assert not list(tmp_path.iterdir())
    ran = kvtape("record", "--print-config")
    assert ran.code == 2  # what lacks an option would not run
    assert "--log" in ran.err


def test_what_a_file_asked_for_runs(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "c.json"
    out = tmp_path / "out.jsonl"
    file.write_text(json.dumps({"verb": "export", "options": {"log": str(log), "format": "jsonl", "out": str(out)}}))
    ran = kvtape("export", "--config", file, "--json")
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["rows"] == len(out.read_text().splitlines())
