"""Engines by name, imported only when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvtape.backends.errors import EnvironmentProblem, UsageError
from kvtape.backends.protocol import Engine, SessionConfig
from kvtape.planner.grammar import nearest

if TYPE_CHECKING:
    from kvtape.backends.llama.engine import LlamaEngine
    from kvtape.backends.openvino.engine import OpenVinoEngine
    from kvtape.backends.reference.session.engine import ReferenceEngine

__all__ = ["ENGINE_NAMES", "check_fits", "open_engine", "require_engine"]

ENGINE_NAMES = ("llama", "openvino", "reference")
_TAKES_FOLDERS = ("openvino", "reference")


def open_engine(name: str, model_path: str | Path, options: Mapping[str, str] | None = None) -> Engine:
    """Load `model_path` on the engine called `name`.

    Raises UsageError for an unknown name, a missing model or an unknown option, EnvironmentProblem where the
    engine is not installed.
    """
    _require(name, model_path)
    try:
        return _engine(name).load(model_path, dict(options or {}))
    except ModuleNotFoundError as err:
        raise _missing(name, err) from None


def check_fits(name: str, model_path: str | Path, config: SessionConfig) -> int:
    """The effective context that a session with `config` would get, found out before anything is loaded.

    Raises what `open_engine` and the engine's `open` would raise for this model and this configuration, DoesNotFit
    above all.
    """
    _require(name, model_path)
    try:
        return _engine(name).check(model_path, config)
    except ModuleNotFoundError as err:
        raise _missing(name, err) from None


def _engine(name: str) -> type[LlamaEngine | OpenVinoEngine | ReferenceEngine]:
    if name == "llama":
        from kvtape.backends.llama.engine import LlamaEngine

        return LlamaEngine
    if name == "openvino":
        from kvtape.backends.openvino.engine import OpenVinoEngine

        return OpenVinoEngine
    from kvtape.backends.reference.session.engine import ReferenceEngine

    return ReferenceEngine


def require_engine(name: str) -> None:
    """Raises UsageError for a name that is no engine."""
    if name not in ENGINE_NAMES:
        hint = nearest(name, ENGINE_NAMES)
        raise UsageError(f"unknown backend {name!r}{hint} choose one of {', '.join(ENGINE_NAMES)}")


def _require(name: str, model_path: str | Path) -> None:
    require_engine(name)
    if Path(model_path).is_dir():
        if name not in _TAKES_FOLDERS:
            raise UsageError(
                f"{model_path}: {name} does not read the folder of an OpenVINO model; give --model the GGUF that it "
                "was made from, or take the openvino backend"
            )
    elif not Path(model_path).is_file():
        raise UsageError(f"{model_path}: no such model file; give --model the path of a GGUF")


def _missing(name: str, err: ModuleNotFoundError) -> EnvironmentProblem:
    return EnvironmentProblem(f"{name} is not installed ({err}); pip install 'kvtape[{name}]'")
