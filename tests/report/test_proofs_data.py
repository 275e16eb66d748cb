"""Proofs that concern a log: of its models on its engines, with what was refused; and what evaluations came to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import UsageError
from kvtape.backends.proofs.log_rows import log_rows
from kvtape.backends.proofs.store import PROOFS_VARIABLE, add_rows, shipped_rows
from kvtape.eval.intervals import wilson
from kvtape.planner.rows import CertificationRow, TrialRow
from kvtape.report.data.proofs import proofs_of, refusals
from kvtape.report.data.trials import qualities
from kvtape.report.given.reading import Given, Named
from kvtape.report.given.shapes import Certification
from kvtape.traces.reader import Log
from support.logs import session_row

SHIPPED = [row for row in shipped_rows() if row.engine == "llama"]


class CertificationLog:
    """What `proofs_of` reads of a log."""

    def __init__(self, rows: list[CertificationRow]) -> None:
        self.rows = rows

    def certifications(self, run_id: str) -> list[CertificationRow]:
        return [row for row in self.rows if row.run_id == run_id]


def log_of(*rows: Any) -> Log:
    return cast("Log", CertificationLog(log_rows("r0", rows)))


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(PROOFS_VARIABLE, str(tmp_path / "own.json"))
    return tmp_path / "own.json"


def test_only_rows_of_the_logs_model_on_its_engine_count() -> None:
    sessions = [session_row(model_fingerprint=SHIPPED[0].fingerprint, backend="llama")]
    found = proofs_of(log_of(), sessions, ["r0"], Given())
    assert sorted(p.row.subject for p in found) == sorted(row.subject for row in SHIPPED)
    assert {p.where for p in found} == {"comes with kvtape"}
    assert proofs_of(log_of(), [session_row(model_fingerprint="another")], ["r0"], Given()) == ()
    assert proofs_of(log_of(), [session_row(backend="reference")], ["r0"], Given()) == ()


def test_rows_of_the_log_of_results_and_of_the_user_say_where_they_are_from(own: Path) -> None:
    row = SHIPPED[0].model_copy(update={"fingerprint": "llama/0"})
    add_rows([row], own)
    given_file = Named("c.json", Certification("llama", "1", "m", (row,)))
    found = proofs_of(log_of(row), [session_row()], ["r0"], Given((given_file,)))
    assert {p.where for p in found} == {"the user's own", "this log", "c.json"}
    assert len({p.row.subject for p in found}) == 1
    own.write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match=r"own\.json"):
        proofs_of(log_of(), [session_row()], ["r0"], Given())


def test_what_was_refused_stands_there_with_its_reason() -> None:
    sessions = [session_row(model_fingerprint=SHIPPED[0].fingerprint, backend="llama")]
    told = refusals(proofs_of(log_of(), sessions, ["r0"], Given()))
    assert all(refusal.why and "pass" not in refusal.what for refusal in told)
    not_passed = {row.subject for row in SHIPPED if row.kind == "certification" and row.verdict != "pass"}
    assert not_passed <= {refusal.subject for refusal in told}
    assert any(refusal.what == "shift: refused" for refusal in told)


TRIALS = st.lists(
    st.tuples(st.sampled_from(["none", "stream"]), st.booleans(), st.integers(1, 9), st.none() | st.floats(0, 5)),
    min_size=1,
    max_size=12,
)


@given(TRIALS)
def test_trials_are_counted_by_policy_and_means_are_over_tokens(
    drawn: list[tuple[str, bool, int, float | None]],
) -> None:
    rows = [
        TrialRow(run_id="r0", trial=i, session_id="s0", task="t", policy=policy, correct=right, n_tokens=n, nll=nll)
        for i, (policy, right, n, nll) in enumerate(drawn)
    ]
    found = {q.policy: q for q in qualities(rows, {"s0": "llama"})}
    assert list(found) == list(dict.fromkeys(policy for policy, *_ in drawn))
    for policy, q in found.items():
        of = [(right, n, nll) for name, right, n, nll in drawn if name == policy]
        assert (q.n, q.n_tokens, q.backend) == (len(of), sum(n for _, n, _ in of), "llama")
        assert q.recall == sum(right for right, *_ in of) / len(of)
        assert (q.low, q.high) == wilson(sum(right for right, *_ in of), len(of))
        if any(nll is None for *_, nll in of):
            assert q.nll is None
        else:
            assert q.nll == pytest.approx(sum((nll or 0) * n for _, n, nll in of) / q.n_tokens)
