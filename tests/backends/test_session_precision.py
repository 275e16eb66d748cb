"""A session on a precision: refused without a proof, opened uncertified on request, and it says which."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.clock import ManualClock
from kvtape.backends.errors import UnsupportedOperation, UsageError
from kvtape.backends.llama.session import LlamaBackend
from kvtape.backends.proofs.machine import machine_class
from kvtape.backends.proofs.rows import Ability, Measure, ProofRow, Verdict
from kvtape.backends.proofs.store import add_rows
from kvtape.backends.protocol import Backend
from kvtape.backends.session import Session
from kvtape.planner.opening import Opening, opening_of
from kvtape.planner.specs import parse_policy
from kvtape.testing.sink import ListSink
from support import llama_tiny, openvino_tiny

pytestmark = pytest.mark.contract("I5")

FLASH: dict[str, Any] = {"flash_attention": "on"}


@pytest.fixture
def proofs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "proofs.json"
    monkeypatch.setenv("KVTAPE_PROOFS", str(path))
    return path


def test_nothing_that_reads_proofs_is_loaded_for_a_session_without_them() -> None:
    code = (
        "import sys\nimport kvtape.backends.session, kvtape.backends.openvino.engine\n"
        "print([m for m in ('pydantic', 'duckdb', 'gguf') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def opened(backend: Backend, policy: str = "none") -> tuple[Session, ListSink]:
    sink = ListSink()
    spec = parse_policy(policy)
    return Session(backend, spec, sink, ManualClock(), run_id="r", session_id="s"), sink


def certify(path: Path, backend: Backend, subject: str, **verdicts: Verdict) -> None:
    """Plant a row that passes in everything but what `verdicts` says."""
    abilities: Sequence[Ability] = ("open", "quality", "capacity", "round_trip", "snapshot", "shift")
    measures = tuple(Measure(ability=a, name="x", verdict=verdicts.get(a, "pass"), reason="planted") for a in abilities)
    core: Verdict = "fail" if "quality" in verdicts else "pass"
    row = ProofRow(
        kind="certification",
        model="tiny",
        fingerprint=backend.facts.fingerprint,
        engine=backend.name,
        engine_version=backend.engine_version,
        machine=machine_class(),
        day="2026-11-30",
        subject=subject,
        verdict=core,
        measures=measures,
    )
    add_rows([row], path)


def flash_session(**config: Any) -> LlamaBackend:
    return llama_tiny.session(config=FLASH | config)


def test_a_knob_without_a_row_is_refused_before_anything_is_written(proofs: Path) -> None:
    backend = flash_session()
    sink = ListSink()
    with pytest.raises(UsageError, match=r"fa=on is not certified.*kvtape certify --model .* --flash on") as caught:
        Session(backend, parse_policy("none"), sink, ManualClock(), run_id="r", session_id="s")
    assert caught.value.exit_code == 2
    assert sink.events == []
    backend.close()


def test_uncertified_opens_it_and_the_log_says_so(proofs: Path) -> None:
    session, sink = opened(flash_session(uncertified=True))
    with session:
        session.ensure_prefix(llama_tiny.tokens(8))
    assert opening_of(sink.events) == Opening(precision="k=f32,v=f32,fa=on", certified=False)


def test_a_passing_row_opens_it_certified(proofs: Path) -> None:
    backend = flash_session()
    certify(proofs, backend, "k=f32,v=f32,fa=on")
    session, sink = opened(backend)
    with session:
        assert session.explain().capabilities["position_shift"]
    assert opening_of(sink.events) == Opening(precision="k=f32,v=f32,fa=on", certified=True)


def test_a_failing_row_refuses_it_with_its_reason(proofs: Path) -> None:
    backend = flash_session()
    certify(proofs, backend, "k=f32,v=f32,fa=on", quality="fail")
    with pytest.raises(UsageError, match=r"did not pass certification on 2026-11-30 .*--again; or open it uncertified"):
        opened(backend)
    backend.close()


def test_a_base_precision_says_nothing_and_reads_no_document(proofs: Path) -> None:
    proofs.write_text("damaged")
    session, sink = opened(llama_tiny.session())
    session.close()
    assert opening_of(sink.events) == Opening()
    backend = flash_session()
    with pytest.raises(UsageError, match=r"proofs\.json"):
        opened(backend)
    backend.close()


def test_a_failed_shift_row_withholds_the_rotation_and_nothing_else(proofs: Path) -> None:
    backend = flash_session()
    certify(proofs, backend, "k=f32,v=f32,fa=on", shift="fail")
    assert backend.capabilities.position_shift
    session, sink = opened(backend, "stream:sink=4,recent=60")
    with session:
        session.ensure_prefix(llama_tiny.tokens(100))
        session.evict(20, 30)
        before = session.explain()
        with pytest.raises(UnsupportedOperation, match=r"did not pass shift.*planted"):
            session.compact()
        after = session.explain()
    assert after.layout == before.layout
    assert not after.capabilities["position_shift"]
    assert after.capabilities["remove_middle"]
    assert after.capabilities["cold_store"]
    assert '"position_shift": false' in str(sink.sessions[0].capabilities)


def test_a_policy_that_asks_for_rotation_by_name_is_refused_where_it_is_withheld(proofs: Path) -> None:
    backend = flash_session(cold_budget_tokens=0)
    certify(proofs, backend, "k=f32,v=f32,fa=on", shift="fail")
    with pytest.raises(UnsupportedOperation, match=r"rebased.*did not pass shift"):
        opened(backend, "stream:sink=4,recent=60,positions=rebased")
    backend.close()


@pytest.mark.parametrize(
    ("ability", "flag", "operation"),
    [("round_trip", "cold_store", "evict"), ("snapshot", "snapshot_state", "snapshot")],
)
def test_other_abilities_are_withheld_one_by_one(proofs: Path, ability: str, flag: str, operation: str) -> None:
    backend = flash_session()
    certify(proofs, backend, "k=f32,v=f32,fa=on", **{ability: "fail"})
    session, _ = opened(backend)
    with session:
        session.ensure_prefix(llama_tiny.tokens(64))
        able = session.explain().capabilities
        assert {name for name, value in able.items() if value is False} == {flag, *_false(backend)}
        if operation == "snapshot":
            with pytest.raises(UnsupportedOperation, match="did not pass snapshot"):
                session.snapshot()
        else:
            session.evict(10, 20)
            assert session.explain().cold == []


def _false(backend: Backend) -> list[str]:
    flags = {name: getattr(backend.capabilities, name) for name in type(backend.capabilities).__slots__}
    return [name for name, value in flags.items() if value is False]


def test_openvino_f16_is_a_knob_and_f32_is_none(proofs: Path) -> None:
    half = {"kv_type_k": "f16", "kv_type_v": "f16", "options": {"kv": "asked"}}
    backend = openvino_tiny.tiny_session(**half)
    with pytest.raises(UsageError, match=r"k=f16,v=f16 is not certified.*--backend openvino --kv-type f16"):
        opened(backend)
    backend.close()
    session, sink = opened(openvino_tiny.tiny_session(**half, uncertified=True))
    session.close()
    assert opening_of(sink.events).certified is False
    session, sink = opened(openvino_tiny.tiny_session())
    session.close()
    assert opening_of(sink.events) == Opening()
