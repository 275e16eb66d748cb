"""`kvtape doctor`: what works on this machine, what does not, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtape.cli.args import AnyModelPath, AsJson

if TYPE_CHECKING:
    from kvtape.cli.output import Section

__all__ = ["ENGINES", "doctor"]

ENGINES = {"llama": ("llama_cpp", "llama-cpp-python"), "openvino": ("openvino", "openvino")}
"""Engine -> its module and its distribution."""

_PROBE_SECONDS = 120


def doctor(
    logs: Annotated[
        list[Path] | None, typer.Argument(metavar="LOG", help="With --contract: logs to ask.", show_default=False)
    ] = None,
    model: AnyModelPath = None,
    contract: Annotated[
        bool, typer.Option("--contract", help="Say what holds of the parity contract, from logs and a test run.")
    ] = False,
    evidence: Annotated[
        Path | None,
        typer.Option("--evidence", metavar="FILE", help="What pytest -m contract --kvtape-evidence FILE wrote."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Say what works on this machine, and why not.

    Every engine runs a few tokens of the demo model (or --model) in a process of its own. Exits 3 when an installed
    one fails. With --contract it says of each invariant of the parity contract whether it holds, fails or is unproven,
    and exits 1 when one fails.

    \b
    Example:
      kvtape doctor --contract demo-out/demo.duckdb --evidence evidence.json
    """
    from kvtape.backends.errors import UsageError
    from kvtape.cli.models import find_demo_model
    from kvtape.cli.output import emit

    if contract:
        from kvtape.cli.contract import contract_report, contract_sections

        report = contract_report(logs or [], evidence)
        emit("doctor", report, contract_sections(report), as_json=as_json)
        return 1 if any(told["state"] == "fails" for told in report["invariants"].values()) else 0
    if logs or evidence is not None:
        raise UsageError("logs and --evidence belong to --contract; without it doctor looks at this machine alone")
    path = model if model is not None else find_demo_model()
    engines = [_engine(name, path) for name in ENGINES]
    body = {
        "engines": engines,
        "machine": _machine(),
        "model": None if path is None else path.name,
        "advertised": _advertised(path, engines),
        "leftovers": _leftovers(),
    }
    emit("doctor", body, _sections(body), as_json=as_json)
    return 3 if any(e["installed"] and path is not None and not e["works"] for e in engines) else 0


def _advertised(model: Path | None, engines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Precisions on the engines that work; nothing without a model."""
    from kvtape.cli.advertised import advertised

    working = {e["name"]: e["version"] for e in engines if e["works"]}
    return [] if model is None or not working else advertised(model, working)


def _leftovers() -> list[str]:
    """Files in this folder that a process left when it died while it made a log."""
    from kvtape.traces.leftovers import dead_files

    return [file.name for file in dead_files(Path())]


def _machine() -> dict[str, Any]:
    import os
    import platform
    import sys
    from importlib.metadata import version

    return {
        "python": ".".join(str(part) for part in sys.version_info[:3]),
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "duckdb": version("duckdb"),
        "pyarrow": version("pyarrow"),
        "numpy": version("numpy"),
    }


def _cpu_name() -> str:
    import platform

    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _engine(name: str, model: Path | None) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    from kvtape.cli.errors import missing_extra

    module, distribution = ENGINES[name]
    facts: dict[str, Any] = {"name": name, "installed": find_spec(module) is not None, "works": False}
    if not facts["installed"]:
        return {**facts, "remedy": missing_extra(module)}
    try:
        facts["version"] = version(distribution)
    except PackageNotFoundError:
        facts["version"] = None
    if model is None:
        return {**facts, "remedy": "no model to try it on: give one with --model, or install kvtape[demo]"}
    return {**facts, **_probe(name, model)}


def _probe(name: str, model: Path) -> dict[str, Any]:
    """Run the engine in a process of its own: one that aborts natively must not take the doctor with it."""
    import json
    import subprocess
    import sys

    command = [sys.executable, "-m", "kvtape.cli.probe", name, str(model)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"remedy": f"{name} did not answer within {_PROBE_SECONDS} s on this model; try a smaller one"}
    if done.returncode == 0:
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return {**facts, "works": True}
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    how = f"died of signal {-done.returncode}" if done.returncode < 0 else f"failed with exit code {done.returncode}"
    return {"remedy": f"{name} {how}: {last.removeprefix('kvtape: ')}"}


def _sections(body: dict[str, Any]) -> list[Section]:
    from kvtape.cli.output import Section

    engines = body["engines"]
    sections = [
        Section("machine", ("what", "value"), list(body["machine"].items())),
        Section(
            f"engines on {body['model'] or 'no model'}",
            ("engine", "version", "works", "what to do"),
            [(e["name"], e.get("version"), e["works"], e.get("remedy", "nothing")) for e in engines],
        ),
    ]
    able = [e for e in engines if e["works"]]
    if able:
        rows = [(flag, *(e["capabilities"][flag] for e in able)) for flag in able[0]["capabilities"]]
        sections.append(Section("capabilities", ("capability", *(e["name"] for e in able)), rows))
        reasons = [(e["name"], flag, why) for e in able for flag, why in e["refusals"].items()]
        sections.append(Section("why not", ("engine", "capability", "reason"), reasons))
    if body["advertised"]:
        known = [(a["engine"], a["precision"], a["day"] or "base", ", ".join(a["without"])) for a in body["advertised"]]
        title = "advertised precisions (kvtape certify measures others)"
        sections.append(Section(title, ("engine", "precision", "certified", "without"), known))
    if body["leftovers"]:
        title = "left here by a process that died while it made a log; no part of any log, may be removed"
        sections.append(Section(title, ("file",), [(name,) for name in body["leftovers"]]))
    return sections
