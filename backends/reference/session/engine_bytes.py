"""A copied session of a KV engine as bytes. Engines keep what they like, so it is pickled; only their own types and
arrays come back, and the weights, which are the session's, stay where they are.
"""

from __future__ import annotations

import io
import pickle
from typing import Any, Final

from kvtape.backends.errors import StateRejected
from kvtape.backends.reference.engines.session_engine import EngineSnapshot
from kvtape.backends.reference.model.weights import Weights

__all__ = ["engine_from_bytes", "engine_to_bytes"]

_WEIGHTS: Final = "weights"
_OURS: Final = "kvtape.backends.reference."
_BESIDE: Final = frozenset(
    {
        ("builtins", "bytearray"),
        ("builtins", "frozenset"),
        ("builtins", "set"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "scalar"),
        ("numpy._core.numeric", "_frombuffer"),
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy.core.multiarray", "scalar"),
        ("numpy.core.numeric", "_frombuffer"),
    }
)


def engine_to_bytes(snapshot: EngineSnapshot, weights: Weights) -> bytes:
    class Writer(pickle.Pickler):
        def persistent_id(self, obj: Any) -> str | None:
            return _WEIGHTS if obj is weights else None

    out = io.BytesIO()
    Writer(out, protocol=5).dump((snapshot.spec, snapshot.n_tokens, dict(snapshot.state)))
    return out.getvalue()


def engine_from_bytes(payload: bytes, weights: Weights) -> EngineSnapshot:
    """Raises StateRejected for bytes that are no copy of an engine, or name anything else than engines and arrays."""

    class Reader(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Weights:
            if pid != _WEIGHTS:
                raise pickle.UnpicklingError(f"unknown reference {pid!r}")
            return weights

        def find_class(self, module: str, name: str) -> Any:
            if (module, name) in _BESIDE:
                return super().find_class(module, name)
            found = super().find_class(module, name) if module.startswith(_OURS) else None
            if not isinstance(found, type) or not found.__module__.startswith(_OURS):
                raise pickle.UnpicklingError(f"{module}.{name} is no part of an engine's state")
            return found

    try:
        spec, n_tokens, state = Reader(io.BytesIO(payload)).load()
        return EngineSnapshot(str(spec), int(n_tokens), dict(state))
    except (pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, TypeError, ValueError) as err:
        raise StateRejected(f"saved state is no session of a KV engine: {err}") from None
