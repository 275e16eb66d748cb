"""The first minutes: `pip install kvtape` without extras into a fresh environment, and the modelled demo there.

    python benchmarks/bench_install.py

Prints one JSON line; needs git and what pip installs from (an index, or its cache). Promised: the install in 60 s, its
files within 350 MB (the byte code that pip compiles of them is measured beside), `kvtape demo --modelled` within 5 s.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.repository import copy_tracked

INSTALL_S, SIZE_BYTES, DEMO_S = 60.0, 350_000_000, 5.0
DEMOS = 3


def build(folder: Path) -> Path:
    """The wheel of what git tracks."""
    source = folder / "source"
    copy_tracked(source)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder / "out"), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    (wheel,) = (folder / "out").glob("*.whl")
    return wheel


def sizes(site: Path, before: set[Path]) -> tuple[int, int]:
    """Bytes of the files that came into `site`: as they were shipped, and byte code of them."""
    new = [path for path in site.rglob("*") if path.is_file() and path not in before]
    compiled = sum(path.stat().st_size for path in new if path.suffix == ".pyc")
    return sum(path.stat().st_size for path in new) - compiled, compiled


def main() -> int:
    """Exit 1 when one of the three is over its limit."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheel = build(folder)
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        binaries = folder / "venv" / "bin"
        (site,) = (folder / "venv").glob("lib/python*/site-packages")
        before = set(site.rglob("*"))
        began = time.perf_counter()
        subprocess.run([binaries / "python", "-m", "pip", "install", "--quiet", wheel], check=True, stderr=sys.stderr)
        install_s = time.perf_counter() - began
        shipped, compiled = sizes(site, before)
        demo_s = []
        for _ in range(DEMOS):
            began = time.perf_counter()
            command = [binaries / "kvtape", "demo", "--modelled", "--out", folder / "demo-out"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            demo_s.append(time.perf_counter() - began)
    figures = {
        "install_s": round(install_s, 1),
        "install_limit_s": INSTALL_S,
        "files_mb": round(shipped / 1e6, 1),
        "files_limit_mb": SIZE_BYTES / 1e6,
        "byte_code_mb": round(compiled / 1e6, 1),
        "demo_first_s": round(demo_s[0], 2),
        "demo_median_s": round(statistics.median(demo_s), 2),
        "demo_limit_s": DEMO_S,
    }
    print(json.dumps({"benchmark": "install", **figures}, sort_keys=True))
    kept = install_s <= INSTALL_S and shipped <= SIZE_BYTES and statistics.median(demo_s) <= DEMO_S
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
