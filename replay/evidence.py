"""Evidence of a test run for the parity contract: what ran, how it ended, and of which sources it speaks."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvtape.backends.errors import UsageError
from kvtape.backends.user_files import write_whole

__all__ = ["INVARIANTS", "REQUIRED", "Evidence", "Tally", "read_evidence", "sources_digest", "write_evidence"]

INVARIANTS = ("I1", "I2", "I3", "I4", "I5", "I6", "I7")

REQUIRED: Mapping[str, tuple[str, ...]] = {
    "I1": ("test_fault_matrix.py", "test_fault_refusals.py", "test_slots.py", "test_slots_engines.py"),
    "I2": ("test_capability_truth.py",),
    "I3": ("test_parity.py",),
    "I4": ("test_identities.py", "test_telemetry.py"),
    "I5": (
        "test_certifying.py",
        "test_check.py",
        "test_openvino_storage.py",
        "test_opt_ins.py",
        "test_session_precision.py",
    ),
    "I6": ("test_deferred.py", "test_deferred_engines.py", "test_gate_command.py", "test_opt_ins.py"),
    "I7": (
        "speculation/test_speculation.py",
        "test_drafters.py",
        "test_gate.py",
        "test_gate_command.py",
        "test_gate_effect.py",
        "test_opt_ins.py",
        "test_verifying.py",
    ),
}
"""Test files, by the end of their paths, without which a run proves nothing of an invariant."""

_SCHEMA = "kvtape-evidence/1"
_ROOMS = ("backends", "capacity", "cli", "eval", "planner", "replay", "report", "serve", "sim", "testing", "traces")


@dataclass(frozen=True, slots=True)
class Tally:
    """Tests of one invariant; `cells` of those that passed are cells of a matrix, `failures` names what failed."""

    passed: int
    failed: int
    skipped: int
    cells: int
    failures: tuple[str, ...]
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """`tests`: `{id, invariant, outcome, cell}` each, outcome passed, failed, skipped or not run; `deselected`: how
    many tests of an invariant were left out; `narrowed`: what else of the command left out an unknown number.
    """

    kvtape_version: str
    sources: str
    tests: tuple[Mapping[str, Any], ...]
    deselected: Mapping[str, int]
    narrowed: tuple[str, ...]

    @property
    def stale(self) -> str | None:
        """Why it speaks of another kvtape than this one; None when it does not."""
        if self.kvtape_version != version("kvtape"):
            return f"it is of kvtape {self.kvtape_version}, this is {version('kvtape')}"
        return None if self.sources == sources_digest() else "the sources have changed since"

    def count(self, invariant: str) -> Tally:
        """What ran for `invariant`, and what must have and did not."""
        mine = [t for t in self.tests if t["invariant"] == invariant]
        by_outcome = Counter(t["outcome"] for t in mine)
        return Tally(
            passed=by_outcome["passed"],
            failed=by_outcome["failed"],
            skipped=by_outcome["skipped"],
            cells=sum(t["outcome"] == "passed" and bool(t["cell"]) for t in mine),
            failures=tuple(str(t["id"]) for t in mine if t["outcome"] == "failed"),
            missing=(*_files_without_proof(invariant, mine), *self._left_out(invariant, by_outcome["not run"])),
        )

    def _left_out(self, invariant: str, not_run: int) -> Iterator[str]:
        deselected = self.deselected.get(invariant, 0)
        if deselected:
            yield f"{deselected} deselected tests"
        if not_run:
            yield f"{not_run} tests that it never came to"
        if self.narrowed:
            yield f"what {' '.join(self.narrowed)} left out"


def _files_without_proof(invariant: str, tests: Iterable[Mapping[str, Any]]) -> list[str]:
    """Required files of which no test came to an end; skipped ones say nothing."""
    ended = [str(t["id"]) for t in tests if t["outcome"] in ("passed", "failed")]
    files = {"/" + name.partition("::")[0] for name in ended}
    return [name for name in REQUIRED.get(invariant, ()) if not any(file.endswith(f"/{name}") for file in files)]


def write_evidence(
    path: Path,
    tests: Sequence[Mapping[str, Any]],
    deselected: Mapping[str, int],
    narrowed: Sequence[str] = (),
    sources: str | None = None,
) -> None:
    """Write what ran, for `read_evidence`; whole or not at all. `sources`: the digest when it began, if not now."""
    body = {
        "schema": _SCHEMA,
        "kvtape_version": version("kvtape"),
        "sources": sources or sources_digest(),
        "tests": list(tests),
        "deselected": dict(deselected),
        "narrowed": list(narrowed),
    }
    write_whole(path, json.dumps(body, sort_keys=True, indent=1) + "\n")


def read_evidence(path: Path) -> Evidence:
    """Raises UsageError for a file that is not there or is no evidence."""
    try:
        body = json.loads(path.read_bytes())
        if body["schema"] != _SCHEMA:
            raise ValueError(f"schema {body['schema']!r}, this kvtape reads {_SCHEMA!r}")
        tests = tuple(
            {key: str(t[key]) for key in ("id", "invariant", "outcome")} | {"cell": t["cell"]} for t in body["tests"]
        )
        return Evidence(
            body["kvtape_version"], body["sources"], tests, dict(body["deselected"]), tuple(body["narrowed"])
        )
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file; make it with: pytest -m contract --kvtape-evidence {path}") from None
    except OSError as err:
        raise UsageError(f"{path}: {err.strerror}; --evidence takes the file of a test run") from None
    except (KeyError, TypeError, ValueError, RecursionError) as err:
        raise UsageError(f"{path}: no evidence of a test run ({err!r})") from None


def sources_digest() -> str:
    """SHA-256 hex over every module of kvtape that is installed here, by name."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        spec = find_spec(f"kvtape.{room}")
        if spec is None or spec.origin is None:
            continue
        folder = Path(spec.origin).parent
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{room}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
