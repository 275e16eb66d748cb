"""Logs of sessions with packed keys and values: replayed equal where rows say their token, told where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtape.backends.llama import blob, kv_types
from kvtape.backends.llama.spread import RowReader
from kvtape.backends.reference.model.weights import Weights
from kvtape.capacity.model import read_model
from kvtape.planner.events import Way
from kvtape.replay.findings import Tolerances
from kvtape.replay.identity import Identified
from kvtape.replay.judge import Judge
from kvtape.replay.ledger import LedgerRows
from kvtape.replay.lineage import Rows
from kvtape.replay.replayer import replay
from kvtape.replay.report import ReplayReport
from support.script_log import ScriptLog
from support.scripted import Script
from support.tiny_gguf import write_tiny

NARROW = "llama:shift_quantised=yes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return write_tiny(folder / "wide.gguf", "llama", n_embd=128, n_head=4, n_head_kv=2, head_dim=64)


def session() -> Script:
    """Gaps, a block that leaves and comes back, a refill, a snapshot, and keys that are moved twice."""
    s = Script()
    s.prefill(list(range(3, 63)))
    (block,) = s.evict(10, 20, cold=True)
    s.decode([70, 71])
    s.admit(block)
    saved = s.snapshot()
    s.evict(20, 26)
    s.refill(20, 26, 20)
    s.decode([72])
    s.restore(saved)
    s.evict(30, 36, way=Way.REBASED)
    s.evict(5, 9, way=Way.REBASED)
    s.decode([73, 74])
    return s


def run(model: Path, k: str, v: str, *on: str, flash: bool = True) -> ReplayReport:
    columns = {"kv_type_k": k, "kv_type_v": v, "flash_attention": flash}
    return replay(ScriptLog([session()], read_model(model).fingerprint, **columns), on, model)


@pytest.mark.parametrize(
    ("k", "v", "flash", "on"),
    [
        ("q8_0", "q8_0", True, "llama"),
        ("q8_0", "f16", False, "llama"),
        ("f16", "q8_0", True, "llama"),
        ("q8_0", "q4_0", True, "llama"),
        ("q5_1", "q5_1", True, NARROW),
        ("q5_0", "q5_0", True, NARROW),
        ("q4_1", "q4_1", True, NARROW),
        ("q4_0", "q4_0", True, NARROW),
        ("iq4_nl", "iq4_nl", True, NARROW),
    ],
)
def test_the_same_rows_are_resident_and_every_one_says_its_token(
    model: Path, k: str, v: str, flash: bool, on: str
) -> None:
    """Logits of 4-bit keys are another matter: some fail the gate, as they should."""
    report = run(model, k, v, on, flash=flash)
    (backend,) = report.backends
    assert backend.residency_equal, report.to_json()["first_divergence"]
    assert report.equal or "4" in k
    assert backend.kv_types == f"{k}/{v}"
    assert backend.witness_identities == backend.witness_rows > 500
    assert backend.witness_unclear == 0
    assert not report.notes


def test_an_engine_without_packed_rows_keeps_its_own_and_says_so(model: Path) -> None:
    report = run(model, "q8_0", "q8_0", "llama", "openvino")
    assert report.equal, report.to_json()["first_divergence"]
    assert [b.kv_types for b in report.backends] == ["q8_0/q8_0", "f32/f32"]
    assert report.notes == ("openvino: keeps keys/values as f32/f32, recorded were q8_0/q8_0",)


def _scaled(ggml_type: int, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    found = kv_types.numbers(ggml_type, rows)
    return found * np.float32(1.07) if ggml_type == kv_types.GGML_TYPES["q8_0"] else found


def _swapped(ggml_type: int, rows: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    found = kv_types.numbers(ggml_type, rows)
    return found.reshape(len(found), -1, 2)[:, :, ::-1].reshape(found.shape)


@pytest.mark.parametrize("wrong", [_scaled, _swapped])
def test_rows_that_are_unpacked_wrongly_are_caught(model: Path, monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(blob, "numbers", wrong)
    _assert_no_row_is_its_token(run(model, "q8_0", "q8_0", "llama"))


def test_rows_that_stay_spread_are_caught(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = RowReader.__init__

    def forgetful(self: RowReader, *args: Any) -> None:
        real(self, *args)
        self._key_size = 1

    monkeypatch.setattr(RowReader, "__init__", forgetful)
    _assert_no_row_is_its_token(run(model, "q8_0", "q8_0", "llama"))


def _assert_no_row_is_its_token(report: ReplayReport) -> None:
    assert not report.equal
    assert report.first_divergence is not None
    assert "60 rows do not hold their token" in report.first_divergence.finding.what


# -- where rounding leaves a key between two tokens ------------------------------------------------------------------


class _Fixed:
    """A key table that has measured these distances."""

    def __init__(self, distance: list[float], other: list[float]) -> None:
        self._seen = Identified(np.full(len(distance), 7), np.array(distance), np.array(other))

    def identify(self, *_: object) -> Identified:
        return self._seen


@pytest.mark.parametrize(
    ("distance", "other", "moves", "known", "unclear"),
    [
        (0.10, 0.151, 0, 1, 0),
        (0.10, 0.149, 0, 0, 1),
        (0.12, 0.100, 0, 0, 1),
        (0.12, 0.079, 0, 0, 0),
        (0.17, 1.000, 0, 0, 0),
        (0.17, 1.000, 1, 1, 0),
        (0.17, 0.200, 1, 0, 1),
        (float("inf"), 1.0, 9, 0, 0),
    ],
    ids=["clear", "between", "nearer-to-another", "is-another", "too-far", "moved", "moved-between", "no-number"],
)
def test_a_row_is_known_unclear_or_wrong(
    model: Path, distance: float, other: float, moves: int, known: int, unclear: int
) -> None:
    """q4_0 keys of f32 weights: 0.126 may be rounding, 0.178 once moved; 1.5 times nearer than any other is clear."""
    judge = Judge(Weights(model), np.array([7, 8]), Tolerances.of(weights="f32", kv_type_k="q4_0"))
    one = np.zeros(1, np.int64)
    rows = np.zeros((1, 128), np.float32)
    stored = LedgerRows(one, one, _kv(rows), np.array([moves]))
    judge._ledger._current = stored
    judge._table = _Fixed([distance], [other])  # type: ignore[assignment]
    findings, found_known, found_unclear = judge._identify(Rows(one, one, one, np.array([7])), stored.rows)
    assert (found_known, found_unclear) == (known, unclear)
    assert len(findings) == 1 - known - unclear


def _kv(rows: npt.NDArray[np.float32]) -> Any:
    from kvtape.backends.protocol import KvRows

    return KvRows((rows,), (rows,))


def test_unclear_rows_make_a_replay_unequal_and_it_says_why(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtape.replay.judge.MARGIN", 1e6)
    report = run(model, "q4_0", "q4_0", NARROW)
    (backend,) = report.backends
    assert backend.residency_equal
    assert backend.witness_unclear == backend.witness_rows
    assert backend.witness_identities == 0
    assert not report.equal
    (note,) = report.notes
    assert "stored as q4_0/q4_0 so coarsely" in note
