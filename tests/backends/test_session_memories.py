"""Sessions on memories that are not one plain cache: what cannot be taken out is refused or computed again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UnsupportedOperation
from kvtape.backends.protocol import Logits, SessionConfig
from kvtape.backends.session import Session
from kvtape.planner.events import Op, Way
from kvtape.planner.residency import fold
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from support.engines import load_engine
from support.tiny_gguf import write_tiny

TOKENS = [int(t) for t in np.random.default_rng(3).integers(3, 200, 200)]


def open_session(tmp_path: Path, arch: str, options: dict[str, str] | None = None) -> tuple[Session, ListSink]:
    path = tmp_path / f"{arch}.gguf"
    engine = load_engine("llama", path if path.exists() else write_tiny(path, arch))
    config = SessionConfig(n_ctx=256, chunk=64, kv_type_k="f32", kv_type_v="f32", options=options or {})
    sink = ListSink()
    backend = engine.open(config)
    return Session(backend, parse_policy("none"), sink, ManualClock(), run_id="r", session_id="s"), sink


def logits_of(session: Session) -> Logits:
    assert session.logits is not None
    return session.logits


@pytest.mark.parametrize("arch", ["lfm2", "mamba"])
def test_f10_a_partial_removal_that_the_memory_refuses_changes_nothing(tmp_path: Path, arch: str) -> None:
    session, sink = open_session(tmp_path, arch)
    with session:
        session.ensure_prefix(TOKENS[:100])
        with pytest.raises(UnsupportedOperation, match="no token can be taken out"):
            session.evict(10, 20)
        assert sink.events[-1].op is Op.REFUSE
        assert session.resident.as_pairs() == [(0, 100)]
        session.decode(3, choose=lambda _: 7)


@pytest.mark.parametrize(
    ("arch", "options"),
    [("lfm2", {}), ("mamba", {}), ("gemma3", {}), ("gemma3", {"swa_full": "yes"})],
    ids=["hybrid", "recurrent", "windowed", "windowed-full"],
)
@pytest.mark.parametrize("cut", [40, 190])
def test_f11_a_diverging_prompt_computes_what_cannot_be_taken_back(
    tmp_path: Path, arch: str, options: dict[str, str], cut: int
) -> None:
    """The same numbers as a fresh session, and the rebuild stands in the log as what it cost."""
    prompt = [*TOKENS[:cut], 5, 6, 7]
    session, sink = open_session(tmp_path, arch, options)
    with session:
        session.ensure_prefix(TOKENS)
        assert session.ensure_prefix(prompt).reused == cut
        turned = logits_of(session)
        (truncation,) = [e for e in sink.events if e.op is Op.TRUNCATE]
        assert fold(sink.events).resident.as_pairs() == [(0, len(prompt))]
    if truncation.way is Way.RECOMPUTE:
        assert truncation.recomputed_tokens == cut
    else:
        assert options, "only a windowed cache that keeps all its rows can be cut"
    fresh, _ = open_session(tmp_path, arch, options)
    with fresh:
        fresh.ensure_prefix(prompt)
        np.testing.assert_allclose(turned, logits_of(fresh), atol=1e-5)
