"""Run the blocks of the pages and write anew the outputs that no longer hold (`make docs`).

python docs/write_outputs.py [PAGE...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.page_runs import prepare, refilled  # noqa: E402
from support.pages import PAGES  # noqa: E402


def main(names: list[str]) -> None:
    """Rewrite the pages named, or all that have blocks to run."""
    for name in names or PAGES:
        with tempfile.TemporaryDirectory() as folder:
            prepare(Path(folder))
            text = refilled(name, Path(folder), slow=True)
        (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
