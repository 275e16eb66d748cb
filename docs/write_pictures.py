"""Draw the residency map of the bundled log's first session anew: the picture of the README and of the pages."""

from __future__ import annotations

import tempfile
from pathlib import Path

from kvtape.cli.demo_script import ESSAY
from kvtape.cli.files import write_whole
from kvtape.cli.plots.residency import residency_picture
from kvtape.cli.sample.bundled import unpack_sample
from kvtape.traces.reader import open_log

PICTURE = Path(__file__).with_name("residency-map.svg")


def picture() -> str:
    """As SVG; the same bytes each time."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "demo.duckdb"
        unpack_sample(log)
        with open_log(log) as tape:
            return residency_picture(tape, tape.session(tape.default_run().run_id, ESSAY.session_id))


if __name__ == "__main__":
    write_whole(PICTURE, picture())
