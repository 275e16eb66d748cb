"""Golden logs, one of each schema version, with a row of every kind.

    python -m support.golden        writes tests/golden/log-vN of today's version anew

Those of older versions are never written again, nor is today's once it is released: every later kvtape must read them.
"""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from kvtape.backends.protocol import SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.events import SCHEMA_VERSION, Op
from kvtape.planner.rows import TrialRow
from kvtape.planner.specs import parse_policy
from kvtape.testing.toy import open_toy
from kvtape.traces.reader import Log, open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.schema import ROW_TABLES
from kvtape.traces.wire import to_json
from support.logs import KEY, TickClock, certification_row, event, record_script, run_row, script, session_row

__all__ = ["GOLDEN", "facts", "unpack"]

GOLDEN = Path(__file__).parents[1] / "golden"
_TODAY = f"log-v{SCHEMA_VERSION}"


def make(path: Path) -> None:
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY)
    record_script(recorder, script())
    config = SessionConfig(n_ctx=64, chunk=16, options={"scores": "on"})
    policy = parse_policy("snapkv:budget=24,window=4,block=4")
    with Session(
        open_toy(config), policy, recorder, TickClock(), run_id="r0", session_id="scored", content=True
    ) as session:
        session.ensure_prefix(list(range(3, 60)))
    recorder.open_session(session_row("drafted"))
    recorder.record(event(0, Op.OPEN, "drafted", n_tokens=64, resident_tokens=0))
    counts = {"drafted_tokens": 3, "accepted_tokens": 1, "rejected_tokens": 2}
    recorder.record(event(1, Op.GENERATE, "drafted", n_tokens=2, **counts))
    recorder.add_trials(
        [
            TrialRow(
                run_id="r0", trial=0, session_id="t", task="needle", policy="none", n_tokens=3, answer="Oslo", kl=0.5
            )
        ]
    )
    recorder.add_certifications(
        [
            certification_row(
                settings="seed=0",
                verdict="pass",
                ability="speed",
                measure="turn",
                value=0.9,
                low=0.8,
                high=0.95,
                unit="ratio",
                bound="most",
                threshold=0.95,
                reason="none",
            )
        ]
    )
    recorder.seal()


def facts(log: Log) -> dict[str, Any]:
    """What must never change about it: digests, and every row as the reader gives it."""
    tables = {
        table.name: [to_json(row) for row in log._rows(table)]  # every field that has a value
        for table in ROW_TABLES
        if table.since <= log.schema_version
    }
    return {"logical_digest": log.logical_digest(), "chain_digest": log.chain_digest, "rows": tables}


def unpack(folder: Path, name: str = _TODAY) -> Path:
    """A golden log, ready to be read, in `folder`."""
    path = folder / f"{name}.duckdb"
    path.write_bytes(gzip.decompress((GOLDEN / name / "log.duckdb.gz").read_bytes()))
    shutil.copyfile(GOLDEN / name / "log.duckdb.head.json", path.with_name(path.name + ".head.json"))
    return path


def main() -> None:
    golden = GOLDEN / _TODAY
    golden.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "log.duckdb"
        make(path)
        (golden / "log.duckdb.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        shutil.copyfile(path.with_name("log.duckdb.head.json"), golden / "log.duckdb.head.json")
        with open_log(path) as log:
            (golden / "expected.json").write_text(json.dumps(facts(log), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
