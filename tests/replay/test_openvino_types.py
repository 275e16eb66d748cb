"""Logs of OpenVINO sessions whose rows are not f32: opened again as they were, and judged as strictly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvtape.backends.openvino.runner import Runner
from kvtape.capacity.model import read_model
from kvtape.planner.events import Way
from kvtape.planner.opening import Opening
from kvtape.planner.rows import SessionRow
from kvtape.replay.replayer import replay
from kvtape.replay.report import ReplayReport
from kvtape.replay.targets import parse_target
from support.logs import session_row
from support.script_log import ScriptLog
from support.scripted import Script
from support.tiny_gguf import write_tiny

pytestmark = pytest.mark.contract("I5")

MEAN_KL = {("u8", None): 1e-4, ("f16", None): 1e-7, ("bf16", "bf16"): 1e-4, ("u8", "bf16"): 1e-4}
"""To the numpy reference, in nats, as a tiny random model differs by its rows' rounding."""

F32 = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "llama.gguf", n_head=4, n_head_kv=2, head_dim=32)


def session() -> Script:
    s = Script()
    s.prefill(list(range(3, 63)))
    (block,) = s.evict(10, 30, cold=True)
    s.decode([70, 71, 72])
    s.admit(block)
    s.evict(5, 12, way=Way.REBASED)
    s.decode([73])
    saved = s.snapshot()
    s.truncate(50)
    s.restore(saved)
    s.decode([74])
    s.evict(30, 33, way=Way.RECOMPUTE)
    s.decode([75])
    return s


def replayed(model: Path, keys: str, values: str, on: str = "openvino", inference: str | None = None) -> ReplayReport:
    columns = {"backend": "openvino", "kv_type_k": keys, "kv_type_v": values}
    log = ScriptLog([session()], read_model(model).fingerprint, **columns)
    if inference is not None:
        said = Opening(f"k={keys},v={values},inference={inference}", certified=False)
        log.change("s0", 0, detail=said.detail())
    return replay(log, [on], model)


@pytest.mark.parametrize(
    ("keys", "values", "inference"),
    [("u8", "u8", None), ("u8", "f32", None), ("bf16", "bf16", "bf16"), ("u8", "u8", "bf16"), ("f16", "f16", None)],
)
def test_a_log_is_replayed_on_the_types_that_it_was_recorded_on(
    model: Path, keys: str, values: str, inference: str | None
) -> None:
    report = replayed(model, keys, values, inference=inference)
    assert report.equal, report.to_json()["first_divergence"]
    (backend,) = [b for b in report.backends if b.name == "openvino"]
    assert backend.kv_types == f"{keys}/{values}"
    assert backend.witness_identities == backend.witness_rows > 0
    (told,) = report.to_json()["backends"]
    assert 1e-12 < told["mean_kl"] < MEAN_KL[keys, inference], told["mean_kl"]


def neighbour(keys: F32) -> F32:
    """A row of layer 1 stands where its neighbour should."""
    keys[1, 3] = keys[1, 4]
    return keys


def one_level(keys: F32) -> F32:
    """One component of one row is one level off."""
    step = (keys[1, 3, 0].max() - keys[1, 3, 0].min()) / 255
    keys[1, 3, 0, int(np.argsort(keys[1, 3, 0])[7])] += step
    return keys


@pytest.mark.parametrize("wrong", [neighbour, one_level])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_rows_that_are_not_written_as_they_were_are_found(
    model: Path, wrong: Any, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = Runner.load

    def load(self: Runner, keys: F32, values: F32, **rest: Any) -> None:
        if keys.shape[1] > 4:
            keys, values = (wrong(keys.copy()), values) if part == "keys" else (keys, wrong(values.copy()))
        right(self, keys, values, **rest)

    # What a compile writes to learn the grid must come back, or nothing opens.
    monkeypatch.setattr("kvtape.backends.openvino.compiled.Compiled._check_levels", lambda *_: None)
    monkeypatch.setattr(Runner, "load", load)
    report = replayed(model, "u8", "u8")
    assert not report.equal
    found = str(report.to_json()["first_divergence"])
    assert "layer 1" in found
    assert part in found


def row(backend: str, keys: str, values: str) -> SessionRow:
    return session_row("s", "r", backend=backend, kv_type_k=keys, kv_type_v=values)


@pytest.mark.parametrize(
    ("spec", "recorded", "types", "options"),
    [
        ("openvino", ("openvino", "u8", "u8"), ("u8", "u8"), {"kv": "asked"}),
        ("openvino", ("openvino", "f32", "f32"), ("f32", "f32"), {}),
        ("openvino:kv=auto", ("openvino", "u8", "u8"), ("u8", "u8"), {"kv": "auto"}),
        ("openvino:mirror=off", ("openvino", "f16", "f16"), ("f16", "f16"), {"kv": "asked", "mirror": "off"}),
        ("openvino", ("llama", "q8_0", "f16"), ("f32", "f16"), {}),
        ("llama", ("openvino", "u8", "f32"), ("f16", "f32"), {}),
        ("reference", ("openvino", "u8", "u8"), ("f16", "f16"), {}),
        ("llama", ("reference", "f64", "f64"), ("f32", "f32"), {}),
    ],
)
def test_what_a_target_asks_for(
    spec: str, recorded: tuple[str, str, str], types: tuple[str, str], options: dict[str, str]
) -> None:
    config = parse_target(spec).session_config(row(*recorded))
    assert (config.kv_type_k, config.kv_type_v, config.options) == (*types, options)
    assert config.uncertified


def test_what_a_session_computed_in_is_read_from_its_open_event() -> None:
    said = parse_target("openvino").session_config(row("openvino", "u8", "u8"), precision="k=u8,v=u8,inference=bf16")
    assert said.options == {"kv": "asked", "inference": "bf16"}
