"""Engines by name, imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.protocol import Engine

__all__ = ["ENGINE_NAMES", "open_engine"]

ENGINE_NAMES = ("llama", "openvino", "reference")


def open_engine(name: str, model_path: str | Path, options: Mapping[str, str] | None = None) -> Engine:
    """Load `model_path` on the engine called `name`.

    Raises UsageError for an unknown name, a missing model or an unknown option, EnvironmentProblem where the
    engine is not installed or is not built yet.
    """
    if name not in ENGINE_NAMES:
        raise UsageError(f"unknown backend {name!r}; choose one of {', '.join(ENGINE_NAMES)}")
    if name == "reference":
        raise EnvironmentProblem("the reference backend is not part of this version; use llama or openvino")
    if not Path(model_path).is_file():
        raise UsageError(f"{model_path}: no such model file; give --model the path of a GGUF")
    try:
        return _load(name, Path(model_path), dict(options or {}))
    except ModuleNotFoundError as err:
        raise EnvironmentProblem(f"{name} is not installed ({err}); pip install 'kvtape[{name}]'") from None


def _load(name: str, model_path: Path, options: dict[str, str]) -> Engine:
    if name == "llama":
        from kvtape.backends.llama.engine import LlamaEngine

        return LlamaEngine.load(model_path, options)
    from kvtape.backends.openvino.engine import OpenVinoEngine

    return OpenVinoEngine.load(model_path, options)
