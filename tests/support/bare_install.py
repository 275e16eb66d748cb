"""kvtape as `pip install kvtape` gives it, without any extra: a wheel and what it requires, in a new environment.

What is required is linked from this environment instead of downloaded.
"""

from __future__ import annotations

import json
import subprocess
import venv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement

from support.command import Ran

__all__ = ["BareInstall", "install_bare", "required"]

_DRIVER = """
import contextlib, io, json, sys
from kvtape.cli import main
sys.argv[0] = "kvtape"
said = []
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    said.append([code, out.getvalue(), err.getvalue()])
print(json.dumps({"said": said, "modules": sorted({m.split(".")[0] for m in sys.modules})}))
"""


@dataclass(frozen=True)
class BareInstall:
    """`python`: the interpreter of an environment that has nothing else."""

    python: Path

    def run(self, commands: Sequence[Sequence[object]], folder: Path) -> tuple[list[Ran], list[str]]:
        """Commands one after the other in one process in `folder`, and the packages that it imported."""
        done = subprocess.run(
            [str(self.python), "-I", "-c", _DRIVER],
            input=json.dumps([[str(word) for word in command] for command in commands]),
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        return [Ran(*each) for each in answer["said"]], answer["modules"]


def required(name: str) -> set[str]:
    """The distributions that `name` needs without extras, and what they need in turn."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        for text in distribution(waiting.pop()).requires or ():
            requirement = Requirement(text)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if requirement.name not in found:
                found.add(requirement.name)
                waiting.append(requirement.name)
    return found


def install_bare(wheel: Path, folder: Path) -> BareInstall:
    """A new virtual environment in `folder` with `wheel` unpacked, beside links to everything that it requires."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    for name in sorted(required("kvtape")):
        files = distribution(name).files
        assert files, name
        for top in sorted({f.parts[0] for f in files if f.parts[0] not in ("..", "__pycache__")}):
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(distribution(name).locate_file(top))).resolve())
    return BareInstall(folder / "bin" / "python")
