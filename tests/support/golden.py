"""The golden log of schema version 1, with a row of every kind.

    python -m support.golden        writes tests/golden/log-v1 anew

Once version 1 is released those files are never written again: every later kvtape must read them.
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
from kvtape.planner.rows import TrialRow
from kvtape.planner.specs import parse_policy
from kvtape.testing.toy import open_toy
from kvtape.traces.reader import Log, open_log
from kvtape.traces.recorder import Recorder
from kvtape.traces.schema import ROW_TABLES
from kvtape.traces.wire import to_json
from support.logs import KEY, TickClock, record_script, run_row, script

__all__ = ["GOLDEN", "facts", "unpack"]

GOLDEN = Path(__file__).parents[1] / "golden" / "log-v1"


def make(path: Path) -> None:
    recorder = Recorder(path, run_row(), clock=TickClock(), key=KEY)
    record_script(recorder, script())
    config = SessionConfig(n_ctx=64, chunk=16, options={"scores": "on"})
    policy = parse_policy("snapkv:budget=24,window=4,block=4")
    with Session(
        open_toy(config), policy, recorder, TickClock(), run_id="r0", session_id="scored", content=True
    ) as session:
        session.ensure_prefix(list(range(3, 60)))
    recorder.add_trials(
        [
            TrialRow(
                run_id="r0", trial=0, session_id="t", task="needle", policy="none", n_tokens=3, answer="Oslo", kl=0.5
            )
        ]
    )
    recorder.seal()


def facts(log: Log) -> dict[str, Any]:
    """What must never change about it: digests, and every row as the reader gives it."""
    tables = {
        table.name: [to_json(row) for row in log._rows(table)]  # every field that has a value
        for table in ROW_TABLES
    }
    return {"logical_digest": log.logical_digest(), "chain_digest": log.chain_digest, "rows": tables}


def unpack(folder: Path) -> Path:
    """The golden log, ready to be read, in `folder`."""
    path = folder / "log-v1.duckdb"
    path.write_bytes(gzip.decompress((GOLDEN / "log.duckdb.gz").read_bytes()))
    shutil.copyfile(GOLDEN / "log.duckdb.head.json", path.with_name(path.name + ".head.json"))
    return path


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "log.duckdb"
        make(path)
        (GOLDEN / "log.duckdb.gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        shutil.copyfile(path.with_name("log.duckdb.head.json"), GOLDEN / "log.duckdb.head.json")
        with open_log(path) as log:
            (GOLDEN / "expected.json").write_text(json.dumps(facts(log), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
