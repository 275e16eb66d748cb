"""What a log is replayed on: an engine spec and the way evicts are carried out there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvtape.backends.errors import UsageError
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.rounding import PACKED_TYPES
from kvtape.planner.rows import SessionRow
from kvtape.planner.specs import SpecError, parse_spec
from kvtape.replay.lineage import LineageWay

__all__ = ["Target", "parse_target"]

_PADDING = 256
"""A context whose size nobody told is a multiple of this: what engines pad to."""

_WAYS: dict[str, LineageWay] = {"native": "log", "recompute": "recompute"}


@dataclass(frozen=True, slots=True)
class Target:
    """`spec` as written; `way` native (each evict as its event says) or recompute; `options` go to the engine."""

    spec: str
    engine: str
    way: str = "native"
    threads: int | None = None
    options: dict[str, str] = field(default_factory=dict)

    @property
    def lineage_way(self) -> LineageWay:
        return _WAYS[self.way]

    def session_config(
        self, row: SessionRow, peak_tokens: int = 0, cold_tokens: int = 0, precision: str | None = None
    ) -> SessionConfig:
        """What the recorded session ran with, but for what the target says itself. `precision` is what the session
        said of its own when it opened.

        Of an imported session, whose source does not say, it is what a session runs with by default, in a context with
        room for the `peak_tokens` that were resident at once, with a cold store for the `cold_tokens`. Raises
        UsageError where nothing ever was resident.
        """
        n_ctx = row.n_ctx if row.n_ctx is not None else -(-peak_tokens // _PADDING) * _PADDING
        if not n_ctx:
            raise UsageError(
                f"session {row.session_id} ({row.backend}) was imported, and its source tells requests only: nothing "
                "was computed or evicted that could be repeated"
            )
        known = {
            "chunk": row.chunk,
            "kv_type_k": self._askable(row.kv_type_k),
            "kv_type_v": self._askable(row.kv_type_v),
            "flash_attention": {True: "on", False: "off", None: None}[row.flash_attention],
            "threads": self.threads or row.threads,
            "cold_budget_tokens": cold_tokens if row.cold_budget_tokens is None else row.cold_budget_tokens,
            "cold_budget_bytes": row.cold_budget_bytes,
        }
        said: dict[str, Any] = {name: value for name, value in known.items() if value is not None}
        options = self._as_recorded(row, precision) | self.options
        # A replay proves what a log says, whatever is advertised here.
        return SessionConfig(n_ctx=n_ctx, uncertified=True, options=options, **said)

    def _as_recorded(self, row: SessionRow, precision: str | None) -> dict[str, str]:
        """OpenVINO stores and computes in f32 unless told otherwise; a recorded one with other rows was told."""
        told = {"kv", "inference"} & self.options.keys()
        if told or not self.engine == row.backend == "openvino" or {row.kv_type_k, row.kv_type_v} <= {"f32", None}:
            return {}
        _, _, inference = (precision or "").partition("inference=")
        return {"kv": "asked"} | ({"inference": inference} if inference else {})

    def _askable(self, kv_type: str | None) -> str | None:
        """The reference alone has double rows, by an option of its own, OpenVINO alone u8; else it is the nearest."""
        nearest = {"f64": "f32"} | ({"u8": "f16"} if self.engine != "openvino" else {})
        nearest |= {} if self.engine == "llama" else dict.fromkeys(PACKED_TYPES, "f32")
        return nearest.get(kv_type, kv_type) if kv_type is not None else None


def parse_target(text: str) -> Target:
    """`NAME[:way=native|recompute][,threads=N][,engine options]`. Raises SpecError."""
    spec = parse_spec(text)
    if spec.target is not None:
        raise SpecError(f"{text!r}: a backend takes no function; write name[:key=value[,key=value]*]")
    options = dict(spec.args)
    way = options.pop("way", "native")
    if way not in _WAYS:
        raise SpecError(f"{text!r}: unknown way {way!r}; allowed: {', '.join(_WAYS)}")
    threads = options.pop("threads", None)
    if threads is not None and not (threads.isdecimal() and threads.isascii() and int(threads) > 0):
        raise SpecError(f"{text!r}: threads is a whole number of at least 1")
    return Target(text, spec.name, way, None if threads is None else int(threads), options)
