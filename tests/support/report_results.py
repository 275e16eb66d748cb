"""A recorded log with everything that other verbs make of it: what a full report is written from."""

from __future__ import annotations

from pathlib import Path

from support.command import kvtape
from support.recorded import record
from support.tiny_gguf import write_tiny

__all__ = ["RESULTS", "write_results"]

RESULTS = ("costs", "curve", "eval", "replay", "tune", "whatif")


def write_results(folder: Path) -> Path:
    """A tiny model, L.duckdb recorded on it, NAME.json of `RESULTS`, E.duckdb of the evaluation; gives the folder."""
    model, log = write_tiny(folder / "tiny.gguf"), folder / "L.duckdb"
    assert record(model, log, "--content", "--score-all").code == 0
    assert kvtape("calibrate", log, "--out", folder / "costs.json").code == 0
    costs = ("--costs", folder / "costs.json")
    policies = ("--policy", "stream:sink=4", "--policy", "opt:sink=4,recent=8", "--budget", 96, "--budget", 128)
    _printed(folder, "whatif", log, *costs, *policies, "--policy", "none", "--seeds", 3)
    asked = ("--policy", "stream:sink=4,recent=60", "--budget", 96, "--where", "peak_kv_bytes<=1B", "--trials", 4)
    _printed(folder, "tune", log, *costs, *asked, code=1)
    _printed(folder, "curve", log, "--warmup", 0)
    _printed(folder, "replay", log, "--model", model, "--on", "llama")
    needle = ("--tokens", 400, "--seeds", "0:2", "--policy", "stream", "--budget", 96)
    _printed(folder, "eval", "--model", model, "--backend", "llama", *needle, "--log", folder / "E.duckdb")
    return folder


def _printed(folder: Path, verb: str, *args: object, code: int = 0) -> None:
    ran = kvtape(verb, *args, "--json")
    assert ran.code == code, ran.err
    (folder / f"{verb}.json").write_text(ran.out, encoding="utf-8")
