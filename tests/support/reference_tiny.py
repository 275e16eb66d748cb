"""The reference on a tiny model, loaded once a process."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from kvtape.backends.reference.session.engine import ReferenceEngine
from support.tiny_gguf import write_tiny

__all__ = ["engine"]

_folder = tempfile.TemporaryDirectory(prefix="kvtape-reference-")


@functools.cache
def engine() -> ReferenceEngine:
    return ReferenceEngine.load(write_tiny(Path(_folder.name) / "llama.gguf"))
