"""`kvtape --version`: kvtape's own, and of what its results depend on; nothing is imported for it."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

__all__ = ["ENGINES", "version_lines"]

ENGINES: Final = {
    "llama-cpp-python": "llama",
    "openvino": "openvino",
    "openvino-genai": "openvino",
    "openvino-tokenizers": "openvino",
}
"""Packages of engines, and the extra of kvtape that brings each."""

_CORE = ("duckdb", "numpy")


def version_lines() -> list[str]:
    """kvtape first; an engine that is not installed says how to get it."""
    lines = [f"kvtape {version('kvtape')}", f"python {platform.python_version()}"]
    lines += [f"{name} {version(name)}" for name in _CORE]
    for name, extra in ENGINES.items():
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            lines.append(f"{name} is not installed; pip install 'kvtape[{extra}]'")
    return lines
