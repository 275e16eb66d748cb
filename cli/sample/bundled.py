"""The bundled log: what `kvtape demo` once recorded of its model on llama.cpp, ready to be read anywhere.

`docs/write_sample.py` records it anew.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Final

from kvtape.traces.sidecar import head_path

__all__ = ["FACTS", "HEAD", "PACKED", "SampleFacts", "sample_facts", "unpack_sample"]

PACKED: Final = "demo.duckdb.gz"
HEAD: Final = "demo.duckdb.head.json"
FACTS: Final = "facts.json"


@dataclass(frozen=True, slots=True)
class SampleFacts:
    """What the log does not say of itself: the model's last `answer`, its file's name, its trained context (tokens)."""

    answer: str
    model: str
    trained_context: int


def sample_facts() -> SampleFacts:
    return SampleFacts(**json.loads(_read(FACTS)))


def unpack_sample(log: Path) -> None:
    """Write the bundled log and its head to `log`, whose folder is there. Raises OSError where that cannot be."""
    log.write_bytes(gzip.decompress(_read(PACKED)))
    head_path(log).write_bytes(_read(HEAD))


def _read(name: str) -> bytes:
    return (files(__package__) / name).read_bytes()
