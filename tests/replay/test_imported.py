"""What another engine did is carried out on ours: KV events, with surrogate tokens drawn from their block hashes."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtape.backends.errors import UsageError
from kvtape.replay.replayer import replay
from support.imports import imported
from support.repository import ROOT
from support.tiny_gguf import write_tiny

TRACES = ROOT / "examples" / "traces"


def test_kv_events_of_another_engine_leave_the_same_tokens_resident_on_both(tmp_path: Path) -> None:
    """Copies of one block, a trip to the host and back, and blocks that go for good."""
    model = write_tiny(tmp_path / "tiny.gguf")
    with imported(tmp_path, [TRACES / "kv_events.jsonl"]) as log:
        report = replay(log, ["llama", "openvino"], model).to_json()
    assert report["equal"], report["first_divergence"]
    for backend in report["backends"]:
        assert backend["witness_positions"] == backend["residency_events"] == 9
        assert backend["witness_identities"] == backend["witness_rows"] > 500


def test_requests_alone_have_nothing_to_repeat(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    with (
        imported(tmp_path, [TRACES / "requests.jsonl"]) as log,
        pytest.raises(UsageError, match="tells requests only"),
    ):
        replay(log, ["llama"], model)


def test_a_server_log_without_tokens_is_refused_and_no_divergence(tmp_path: Path) -> None:
    model = write_tiny(tmp_path / "tiny.gguf")
    with imported(tmp_path, [TRACES / "server.log"]) as log, pytest.raises(UsageError, match="not which"):
        replay(log, ["llama"], model)
