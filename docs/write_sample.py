"""Record the bundled log anew: what `kvtape demo` records of the demo model on llama.cpp (some minutes).

    python docs/write_sample.py

The log is then part of the package: `kvtape demo --modelled` shows what needs no engine on it.
"""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path

from kvtape.cli.demo_record import record_demo
from kvtape.cli.models import demo_model, trained_context
from kvtape.cli.sample import bundled
from kvtape.traces.sidecar import head_path

FOLDER = Path(bundled.__file__).parent
THREADS = 2


def main() -> None:
    """Write the log, its head and what is said of it into `cli/sample`."""
    model = demo_model()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "demo.duckdb"
        answer = record_demo(log, model, THREADS)
        packed = gzip.compress(log.read_bytes(), compresslevel=9, mtime=0)
        head = head_path(log).read_bytes()
    facts = {"answer": answer, "model": model.name, "trained_context": trained_context(model)}
    (FOLDER / bundled.PACKED).write_bytes(packed)
    (FOLDER / bundled.HEAD).write_bytes(head)
    text = json.dumps(facts, sort_keys=True, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / bundled.FACTS).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
