"""Run the blocks of the pages and write anew the outputs that no longer hold (`make docs`).

python docs/write_outputs.py [PAGE...]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support import contributing  # noqa: E402
from support.page_runs import prepare, refilled  # noqa: E402
from support.pages import PAGES  # noqa: E402

CONTRIBUTING = "docs/contributing.md"


def rerun(name: str, folder: Path) -> str:
    """The page with the outputs of now."""
    if name != CONTRIBUTING:
        prepare(folder)
        return refilled(name, folder, slow=True)
    text = (ROOT / name).read_text(encoding="utf-8")
    for part in contributing.PARTS:
        for block, fresh in zip(*contributing.followed(part, folder / part), strict=True):
            text = text.replace(block.text, fresh)
    return text


def main(names: list[str]) -> None:
    """Rewrite the pages named, or all that have blocks to run."""
    for name in names or (*PAGES, CONTRIBUTING):
        with tempfile.TemporaryDirectory() as folder:
            text = rerun(name, Path(folder))
        (ROOT / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
