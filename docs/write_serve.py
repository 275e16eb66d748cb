"""Write the outputs of the example in `docs/serve.md` anew, by running its blocks (some minutes; not of `make docs`).

python docs/write_serve.py
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

PAGE = Path(__file__).parent / "serve.md"
BLOCK = re.compile(r"```(sh|python)\n(.*?)```\n(\n```text\n.*?```\n)?", re.DOTALL)
PORT = "8080"


def example(text: str) -> tuple[str, str, str]:
    """What is before the example, the example, and what is behind it."""
    begin, end = "<!-- example -->", "<!-- end of example -->"
    before, _, rest = text.partition(begin)
    inside, _, after = rest.partition(end)
    return before + begin, inside, end + after


def play(text: str, folder: Path, adapt: Callable[[str], str] = lambda command: command) -> list[tuple[int, str]]:
    """Run all blocks in one shell in `folder`; of each its exit status and what it wrote. `adapt` changes a block."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    script = ["exec 2>&1"]
    for kind, body, _ in BLOCK.findall(text):
        body = adapt(body).replace(PORT, port)
        script.append(f"python - <<'END'\n{body}END" if kind == "python" else body)
        script.append('printf "\\n<<%d>>\\n" $?')
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
    environment["KVTAPE_PROGRESS"] = "none"  # on a slow machine a line of it came between
    done = subprocess.run(
        ["bash"], input="\n".join(script), capture_output=True, text=True, cwd=folder, env=environment, check=False
    )
    told = re.split(r"\n<<(\d+)>>\n", done.stdout.replace(port, PORT))
    return [(int(code), out.rstrip("\n")) for out, code in zip(told[::2], told[1::2], strict=False)]


def filled(text: str, told: list[tuple[int, str]]) -> str:
    """The page with these outputs."""
    before, inside, after = example(text)
    outputs = iter(told)

    def fresh(found: re.Match[str]) -> str:
        kind, body, _ = found.groups()
        _, out = next(outputs)
        return f"```{kind}\n{body}```\n" + (f"\n```text\n{out}\n```\n" if out else "")

    return before + BLOCK.sub(fresh, inside) + after


def main() -> int:
    """Rewrite docs/serve.md; 1 and nothing written when a block fails."""
    text = PAGE.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        told = play(example(text)[1], Path(folder))
    failed = [out for code, out in told if code]
    if failed or len(told) != len(BLOCK.findall(example(text)[1])):
        print("\n".join(failed) or f"only {len(told)} blocks ended", file=sys.stderr)
        return 1
    PAGE.write_text(filled(text, told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
