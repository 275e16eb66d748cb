"""A session on any backend for tests that know none of them: opened by name, checked by its account and its plans."""

from __future__ import annotations

import functools
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.protocol import Backend, Engine, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.capabilities import Capabilities
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.replay.invariants import plan_findings
from kvtape.testing.sink import ListSink
from support.engines import load_engine
from support.modelled import ModelledEngine
from support.tiny_gguf import write_tiny
from support.watched import ToyEngine

__all__ = ["BACKENDS", "CONFIG", "TOKENS", "Played", "capabilities_of", "open_session", "said"]

_folder = tempfile.TemporaryDirectory(prefix="kvtape-parity-")
TOKENS = [int(t) for t in np.random.default_rng(21).integers(3, 60, 900)]
CONFIG = SessionConfig(n_ctx=256, chunk=64, kv_type_k="f32", kv_type_v="f32", cold_budget_tokens=512)


@dataclass(frozen=True, slots=True)
class _Under:
    """A backend under test: engine, what its model is, and the options of its sessions."""

    engine: str
    model: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)


BACKENDS: dict[str, _Under] = {
    "toy": _Under("toy"),
    "modelled": _Under("modelled"),
    "llama": _Under("llama"),
    "openvino": _Under("openvino"),
    "llama, scores": _Under("llama", options={"scores": "on"}),
    "openvino, scores": _Under("openvino", options={"scores": "on"}),
    "reference": _Under("reference"),
    "reference, scores": _Under("reference", options={"scores": "on"}),
    "llama, no shift (YaRN)": _Under("llama", {"yarn": 4}),
    "llama, no removal (recurrent)": _Under("llama", {"arch": "mamba"}),
    "openvino, no removal (mirror=off)": _Under("openvino", options={"mirror": "off"}),
}
"""Names for people; the tests ask a session's capabilities, never the name."""


@functools.cache
def _engine(name: str) -> Engine:
    under = BACKENDS[name]
    if under.engine == "toy":
        return ToyEngine()
    if under.engine == "modelled":
        return ModelledEngine()
    key = "-".join(f"{k}{v}" for k, v in under.model.items()) or "llama"
    path = Path(_folder.name) / f"{key}.gguf"
    return load_engine(under.engine, path if path.exists() else write_tiny(path, **under.model))


def open_backend(name: str, **config: Any) -> Backend:
    return _engine(name).open(replace(CONFIG, options=BACKENDS[name].options, **config))


@functools.cache
def capabilities_of(name: str, cold: int = CONFIG.cold_budget_tokens) -> Capabilities:
    backend = open_backend(name, cold_budget_tokens=cold)
    backend.close()
    return backend.capabilities


class Played:
    """A session, what it recorded, and the two questions that are asked after every step."""

    def __init__(self, session: Session, sink: ListSink) -> None:
        self.session, self.sink = session, sink

    @property
    def can(self) -> Capabilities:
        return self.session._parts.backend.capabilities

    def check(self) -> None:
        """Fold, books and memory are one account; every plan was carried out, or says why not."""
        state, backend = fold(self.sink.events), self.session._parts.backend
        assert backend.books() == state.layout
        assert state.tape_length == len(self.session.tape)
        for event in self.sink.events:
            if event.reused is not None:
                assert event.reused + (event.forgotten or 0) + (event.prefilled or 0) == event.prompt_tokens
        plans = {p.seq: p for p in self.sink.plans}
        assert plan_findings(self.sink.events, plans) == []
        try:
            seen = backend.witness()
        except UnsupportedOperation:
            return  # a recurrent memory has no row for each token, a modelled one no memory
        where = [p for s in state.layout for p in range(s.cache_start, s.cache_stop)]
        assert sorted(seen.cache_positions.tolist()) == where
        assert {len(rows) for rows in (*seen.rows.keys, *seen.rows.values)} <= {state.resident_tokens}


def open_session(name: str, policy: str, *, cold: int = CONFIG.cold_budget_tokens, **session: Any) -> Played:
    """Raises what the session refuses; its backend is closed then."""
    backend, sink = open_backend(name, cold_budget_tokens=cold), ListSink()
    try:
        opened = Session(backend, parse_policy(policy), sink, ManualClock(), run_id="r", session_id="s", **session)
    except BaseException:
        backend.close()
        raise
    return Played(opened, sink)


def said(session: Session, n: int, seed: int) -> None:
    """Decode tokens that the script says: two engines may break a tie of logits apart."""
    tokens = iter(np.random.default_rng(seed).integers(3, 60, n).tolist())
    session.decode(n, choose=lambda _: int(next(tokens)), stop_tokens=frozenset())
