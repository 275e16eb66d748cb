"""Run every benchmark of this folder, one after the other: `make bench`. Each prints JSON lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Exit 1 when one of them missed its own limit or failed."""
    failed = []
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"# {script.name}", file=sys.stderr, flush=True)
        if subprocess.run([sys.executable, str(script)], check=False).returncode:
            failed.append(script.name)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
