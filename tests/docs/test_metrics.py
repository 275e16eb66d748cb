"""docs/metrics.md explains every key that a report has, and none that none has: commands are run for their keys."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from kvtape.backends.proofs.store import shipped_rows
from kvtape.cli.app import app
from kvtape.eval.gate.report import body_of
from kvtape.sim.whatif.rows import FIGURES
from support.command import kvtape
from support.repository import ROOT

PAGE = ROOT / "docs" / "metrics.md"
SEALED = {"schema", "kvtape_version", "digest", "digest_kind"}
HEADER = "| key | what | formula | unit |"


NO_FIGURES = {
    "demo": "runs the others",
    "diff": "says whether, and where",
    "doctor": "says what works",
    "ffn-server": "serves",
    "models": "lists names",
    "redact": "copies a log",
    "repair": "mends a log",
    "report": "shows what others say",
    "serve": "serves; its metrics are in docs/http-api.md",
    "sql": "says what was asked; columns are in docs/log-schema.md",
}
OF_SECTIONS = {"certify", "eval", "export", "gate", "import", "merge", "record", "tune", "verify", "whatif"}
"""Verbs whose keys are in sections that other tests of this file hold."""


@cache
def sections() -> dict[str, tuple[str, ...]]:
    """The keys of each section's table, in order."""
    found = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        title, _, rest = part.partition("\n")
        rows = [line.split("|")[1] for line in rest.splitlines() if line.startswith("| `")]
        found[title] = tuple(key for cell in rows for key in re.findall(r"`(\w+)`", cell))
    return found


@pytest.fixture(scope="module")
def here(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(prepared, tmp_path_factory.mktemp("metrics") / "here", symlinks=True)


def said(folder: Path, command: str) -> dict[str, Any]:
    """What a command says as JSON; words that name a file of `folder` stand for it."""
    words = [str(folder / w) if (folder / w).exists() else w for w in command.split()]
    words = [str(folder / w.removeprefix("new:")) if w.startswith("new:") else w for w in words]
    ran = kvtape(*words, "--json")
    assert ran.code in (0, 1), ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


def keys(rows: Iterable[dict[str, Any]]) -> set[str]:
    return {key for row in rows for key in row}


REPORTS: dict[str, tuple[str, Callable[[dict[str, Any]], set[str]]]] = {
    "Turns that were simulated": (
        "simulate recorded.duckdb --costs costs.json --policy stream:sink=4,recent=60",
        lambda b: set(b["figures"]) | {"not_served"},
    ),
    "Points of a what-if": (
        "tune recorded.duckdb --costs costs.json --policy stream:sink=4,recent=60,every=1 --budget 128 --trials 1",
        lambda b: keys(b["rows"]) - set(FIGURES) | {"pareto", "pareto_share"},
    ),
    "One simulated turn": (
        "simulate recorded.duckdb --costs costs.json --policy stream:sink=4,recent=60",
        lambda b: keys(b["turns"]),
    ),
    "Requests of a fleet": (
        "fleet examples/traces/requests.jsonl --costs costs.json --pool-blocks 16 --log new:fleet.duckdb",
        lambda b: set(b["figures"]),
    ),
    "Hit rates": (
        "curve examples/traces/requests.jsonl --budget-blocks 2",
        lambda b: keys(b["rows"]) | set(b) - SEALED - {"rows", "rules", "seed", "config_digest", "source_digest"},
    ),
    "What fits": ("capacity M.gguf --memory 1GiB", lambda b: set(b) - SEALED),
    "A replay": ("replay recorded.duckdb --model M.gguf --on llama", lambda b: keys(b["backends"])),
    "What operations cost": (
        "calibrate recorded.duckdb --out new:costs2.json",
        lambda b: (
            keys(k["fit"] for k in b["kinds"].values()) | keys(t for k in b["kinds"].values() for t in k["terms"])
        ),
    ),
    "Recall of a planted fact": (
        "eval --task needle --model M.gguf --seeds 0:1 --policy stream --budget 64 --tokens 200",
        lambda b: keys(b["rows"]),
    ),
    "Likelihood of a text": (
        "eval --task nll --model M.gguf --text book.txt --policy stream --budget 64 --n-ctx 128 --tokens 160",
        lambda b: keys(b["rows"]),
    ),
    "KV engines": (
        "bench --model M.gguf --engine tq4 --prompts 1 --prompt-tokens 8 --steps 2",
        lambda b: keys(b["rows"]),
    ),
    "One run of a KV engine": ("run --model M.gguf --prompt hello --steps 2", lambda b: set(b) - SEALED),
    "A recording, watched": ("top recorded.duckdb", lambda b: keys(b["sessions"])),
    "Counters of a session": ("show recorded.duckdb", lambda b: keys(s["counters"] for s in b["sessions"])),
    "A decision": ("explain recorded.duckdb 4", lambda b: set(b["decision"])),
}


@pytest.mark.parametrize("title", REPORTS)
def test_every_key_of_a_report_is_explained_and_no_other(title: str, here: Path) -> None:
    command, of = REPORTS[title]
    assert set(sections()[title]) == of(said(here, command)), f"docs/metrics.md, {title}"


def test_every_verb_has_its_figures_explained_or_none() -> None:
    held = {command.split()[0] for command, _ in REPORTS.values()} | OF_SECTIONS
    assert held | set(NO_FIGURES) == set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert not held & set(NO_FIGURES)


def test_a_point_has_the_figures_of_its_turns_and_its_own(here: Path) -> None:
    body = said(here, "whatif recorded.duckdb --costs costs.json --policy none --budget 512")
    explained = {*sections()["Points of a what-if"], *sections()["Turns that were simulated"]}
    assert keys(body["rows"]) <= explained
    assert set(FIGURES) <= set(sections()["Turns that were simulated"])


def test_keys_of_what_is_written_are_explained(here: Path) -> None:
    found: set[str] = set()
    for command in (
        "record --text book.txt --policy none --n-ctx 1024 --decode 1 --model M.gguf --log new:again.duckdb",
        "import examples/traces/requests.jsonl --log new:requests.duckdb",
        "verify recorded.duckdb",
        "merge recorded.duckdb new:again.duckdb --out new:merged.duckdb",
        "export recorded.duckdb --format perfetto --out new:trace.json",
    ):
        found |= set(said(here, command)) - SEALED
    assert set(sections()["What was written"]) == found


def test_keys_of_proofs_are_explained() -> None:
    rows = shipped_rows()
    certified = keys(r.model_dump(mode="json") for r in rows if r.kind == "certification")
    certified = {k for k in certified if k not in {"workload", "optimisation"}}
    gated = keys(body_of(r) for r in rows if r.kind == "gate")
    assert certified <= {*sections()["Certification"]}
    assert gated == {*sections()["The gate"]}


def test_keys_of_the_comparison_that_is_shipped_are_explained() -> None:
    """The rows behind docs/continuous-batching.md; running it takes a server's pipeline and minutes."""
    runs = json.loads((ROOT / "docs" / "continuous-batching.json").read_text(encoding="utf-8"))
    assert {*sections()["Beside continuous batching"]} == keys(runs["folder"]["rows"])


def test_every_table_has_the_columns_that_the_page_promises() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(HEADER) == len(sections()) == text.count("\n| key |")
    for line in text.splitlines():
        if line.startswith("| `"):
            assert len(re.split(r"(?<!\\)\|", line)) == 6, line
    for title, named in sections().items():
        assert len(set(named)) == len(named) > 0, title


def test_sources_that_the_page_names_are_there() -> None:
    for name in re.findall(r"`((?:cli|sim|eval|replay|planner|capacity)(?:\.\w+)+)`", PAGE.read_text(encoding="utf-8")):
        path = ROOT / name.replace(".", "/")
        named = path.is_dir() or path.with_suffix(".py").exists() or path.parent.with_suffix(".py").exists()
        assert named, name
