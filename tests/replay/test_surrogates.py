"""A log without content is carried out again on both engines with surrogate tokens: the same positions are resident."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvtape.backends.errors import UsageError
from kvtape.planner.rows import TokensRow
from kvtape.replay.replayer import replay
from kvtape.replay.surrogates import with_surrogates
from kvtape.traces.reader import open_log
from kvtape.traces.redact import redact
from support.logs import event
from support.recorded import record
from support.tiny_gguf import write_tiny

IDS = np.arange(5, 250)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")


@pytest.mark.parametrize("how", ["default", "redacted"])
def test_both_engines_keep_the_same_without_content(model: Path, tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.duckdb"
    assert record(model, path, *(["--content"] if how == "redacted" else [])).code == 0
    if how == "redacted":
        redact(path, tmp_path / "r.duckdb")
        path = tmp_path / "r.duckdb"
    with open_log(path) as log:
        assert all(row.tokens is None for row in log.tokens(log.default_run().run_id, "main").values())
        report = replay(log, ["llama", "openvino"], model)
    assert report.equal, report.first_divergence
    for backend in report.backends:
        assert backend.witness_positions == backend.residency_events > 2
        assert backend.witness_identities == backend.witness_rows > 0
        assert backend.agreement is None, "what a model makes of surrogates is not compared"
    assert "surrogate tokens" in report.notes[0]


def row(seq: int, start: int, n: int, *hashes: str) -> TokensRow:
    text = "[" + ",".join(f'"{h}"' for h in hashes) + "]"
    return TokensRow(
        run_id="r0",
        session_id="s0",
        seq=seq,
        start=start,
        n_tokens=n,
        block_tokens=32,
        hashes=text,
        mac="",
        tokens=None,
    )


def test_what_was_shared_stays_shared() -> None:
    events = [event(0, "prefill", start=0, stop=40), event(1, "recompute", start=8, stop=20)]  # type: ignore[arg-type]
    first = with_surrogates("s0", events, {0: row(0, 0, 40, "aa", "bb"), 1: row(1, 8, 12, "aa")}, IDS)
    other = with_surrogates("s1", events[:1], {0: row(0, 0, 40, "aa", "cc")}, IDS)
    a, b = first[0].tokens, other[0].tokens
    assert a is not None
    assert b is not None
    assert a[:32] == b[:32]
    assert a[32:] != b[32:]
    assert first[1].tokens == a[8:20], "a position keeps its token"
    assert set(a) <= set(IDS.tolist())
    assert len(set(a)) > 20


def test_without_hashes_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"neither its tokens nor their hashes.*record with --content"):
        with_surrogates("s0", [event(0, "prefill", start=0, stop=40)], {0: row(0, 0, 40)}, IDS)  # type: ignore[arg-type]
