"""Real clients on a real server, with faults: `make soak`. One JSON line a soak.

    python benchmarks/soak_serve.py [--seed S] [--quick] [--only PART] [--bare DIR] [--folder DIR] [--out F]

steady   no faults, more conversations than slots; then the same load on `python -m llama_cpp.server` (DIR: a folder
         with what that needs, see the reason it is skipped with)
faults   engine hosts killed, the server stopped, killed, its disk slow and full, clients that leave in the middle

Both on a tiny model on each engine, and on the demo model on llama.cpp. After each: every answer that came to its end
is a turn of the log, with its counts and its text; the log verifies; every conversation said what it says alone with
the same prompts, greedily (`near_ties`: answers that depart where two tokens were about as likely: a cache that was
built in other pieces rounds differently); memory did not grow; the server ended as it should have each time. Exit 1
when one of these is not so.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kvtape.cli.models import demo_model
from support.llama_tiny import model_file
from support.serve_faults import why_not_slow
from support.serve_soak import Soak
from support.server_process import why_not_bare

TINY_TIE = 0.01
REAL_TIE = 0.5
"""Nats. Two correct runs of a quantised model differ by about as much in single logits."""


PARTS = ("steady", "faults", "faults-openvino", "real-steady", "real-faults")


def soaks(seed: int, *, quick: bool) -> dict[str, Soak]:
    """By the names of PARTS; `quick`: without the real model."""
    tiny: dict[str, Any] = {"turns": 5, "clients": 6, "slots": 3, "max_tokens": 24, "n_ctx": 1024, "seed": seed}
    tiny |= {"model": model_file(), "tie": TINY_TIE}
    real = tiny | {"model": demo_model(), "tie": REAL_TIE, "turns": 4, "n_ctx": 512}
    found = {
        "steady": Soak(backend="llama", talks=12 if quick else 120, **tiny),
        "faults": Soak(backend="llama", talks=8 if quick else 60, faults=5 if quick else 30, leave=0.2, **tiny),
        "faults-openvino": Soak(
            backend="openvino", talks=8 if quick else 60, faults=5 if quick else 20, leave=0.2, **tiny
        ),
    }
    if not quick:
        found["real-steady"] = Soak(backend="llama", talks=10, **real)
        found["real-faults"] = Soak(backend="llama", talks=12, faults=8, leave=0.2, **real)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="tiny models and short")
    parser.add_argument("--only", choices=PARTS, action="append", help="may be given more than once; default: all")
    parser.add_argument("--bare", type=Path, default=None, metavar="DIR")
    parser.add_argument("--folder", type=Path, default=None, help="where to write; default: a temporary folder")
    parser.add_argument("--out", type=Path, default=None, metavar="F", help="the reports as one JSON file too")
    asked = parser.parse_args()
    why_not = why_not_bare(asked.bare)
    reports = []
    for part, soak in soaks(asked.seed, quick=asked.quick).items():
        if asked.only and part not in asked.only:
            continue
        with tempfile.TemporaryDirectory(dir=asked.folder) as name:
            began = time.perf_counter()
            report = {"soak": part, **soak.run(Path(name))}
            if soak.faults and why_not_slow():
                report["disk_slow_skipped"] = why_not_slow()
            if not soak.faults:
                report["bare"] = {"skipped": why_not} if why_not else soak.bare(Path(name), asked.bare)
            report["seconds"] = round(time.perf_counter() - began)
        reports.append(report)
        print(json.dumps(report, sort_keys=True), flush=True)
        if asked.out:
            asked.out.write_text(json.dumps(reports, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if any(r["wrong"] for r in reports) else 0


if __name__ == "__main__":
    sys.exit(main())
