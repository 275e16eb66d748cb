"""Capacity delta: the bytes that the calculator predicts for a token, against those that the engine stores.

llama.cpp writes its cells out as they lie in memory, so two exports of different length give the bytes of one token.
OpenVINO reads its states out as f32 whatever they are stored as, and tells of no size; what is known is the storage
type, which the backend proves bit for bit from rows that it reads back. There the figure follows from that type.
"""

from __future__ import annotations

from typing import Final

from kvtape.backends.envelope import unwrap
from kvtape.backends.fit import read_shape
from kvtape.backends.llama.blob import cells_size
from kvtape.backends.proofs.rows import Measure
from kvtape.backends.protocol import Backend
from kvtape.capacity.allocation import CacheSettings
from kvtape.capacity.engines import engine_rule
from kvtape.capacity.geometry import LayerKind
from kvtape.eval.certification.bench import Bench
from kvtape.eval.certification.thresholds import judged

__all__ = ["row_bytes"]

_RULES: Final = {"llama": "llama.cpp", "openvino": "openvino"}
_ROWS: Final = 32
_NO_SIZE: Final = "the runtime tells of no size: this is the width of the storage type that its rows prove bit for bit"


def row_bytes(bench: Bench) -> list[Measure]:
    """Predicted, measured and their difference, bytes a token, keys and values of all layers.

    Raises UnsupportedOperation where a session cannot export, and what sessions raise.
    """
    n = 2 * _ROWS
    with bench.opened(f"none:block={_ROWS}", n, cold_tokens=n) as (session, backend):
        session.ensure_prefix(bench.smoke.tokens[:n])
        written = backend.name == "llama"
        stored = _serialised(backend) if written else _by_type(backend, n)
        predicted = _predicted(backend)
    told = Measure.judged("capacity", "stored_row_bytes", stored, "bytes/token")
    return [
        Measure.judged("capacity", "predicted_row_bytes", predicted, "bytes/token"),
        told if written else told.model_copy(update={"reason": _NO_SIZE}),
        judged("capacity", "row_bytes_delta", stored - predicted),
    ]


def _predicted(backend: Backend) -> float:
    """What `kvtape capacity` adds for a token in every layer that keeps one."""
    geometry = read_shape(backend.facts.path).geometry.stored_as(backend.config.kv_type_k, backend.config.kv_type_v)
    settings = CacheSettings(flash_attention=backend.config.flash_attention != "off")
    caches = engine_rule(_RULES[backend.name]).caches(geometry, settings)
    return float(
        sum(
            line.k_cell_bytes + line.v_cell_bytes for line in caches.lines if line.group.kind is not LayerKind.RECURRENT
        )
    )


def _serialised(backend: Backend) -> float:
    """The last rows written out by the engine, less its list of cells."""
    sizes = [len(unwrap(backend.export_block(2 * _ROWS - k, 2 * _ROWS), {})[1]) for k in (_ROWS, 2 * _ROWS)]
    return (sizes[1] - sizes[0] - (cells_size(2 * _ROWS) - cells_size(_ROWS))) / _ROWS


def _by_type(backend: Backend, n: int) -> float:
    """By the backend's account of its rows, each of the type that it has proven."""
    return backend.kv_bytes()["resident"] / n
