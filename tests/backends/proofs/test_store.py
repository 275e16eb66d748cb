"""The store of proofs: nothing is lost, nothing damaged is read, and the newest row of exactly this is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import UsageError
from kvtape.backends.proofs.machine import class_of, machine_class, speed_class
from kvtape.backends.proofs.rows import Measure, ProofRow, verdict_of
from kvtape.backends.proofs.store import Proofs, add_rows, document, open_proofs, proofs_path, read_rows, shipped_rows

PLACE = {"fingerprint": "llama/1", "engine": "llama", "engine_version": "1.0", "machine": "m"}


def row(subject: str = "k=q8_0,v=q8_0,fa=on", day: str = "2026-11-30", **changed: object) -> ProofRow:
    facts: dict[str, object] = {"kind": "certification", "model": "m.gguf", "day": day, "verdict": "pass", **PLACE}
    return ProofRow.model_validate(facts | {"subject": subject} | changed)


_text = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "Zs")), min_size=1, max_size=12)
_number = st.floats(allow_nan=False, allow_infinity=False)
_measures = st.builds(
    Measure,
    ability=st.sampled_from(["open", "quality", "capacity", "round_trip", "snapshot", "shift", "speed"]),
    name=_text,
    value=st.none() | _number,
    unit=_text,
    threshold=st.none() | _number,
    bound=st.sampled_from(["most", "least", "equal"]),
    verdict=st.sampled_from(["pass", "fail", "refused"]),
    reason=st.none() | _text,
)
_rows = st.builds(
    ProofRow,
    kind=st.sampled_from(["certification", "gate"]),
    model=_text,
    fingerprint=st.sampled_from(["a", "b"]),
    engine=st.sampled_from(["llama", "openvino"]),
    engine_version=_text,
    machine=_text,
    day=st.dates().map(lambda d: d.isoformat()),
    subject=_text,
    settings=st.just("") | _text,
    verdict=st.sampled_from(["pass", "fail", "refused"]),
    reason=st.none() | _text,
    measures=st.lists(_measures, max_size=3).map(tuple),
)


@given(batches=st.lists(st.lists(_rows, max_size=3), max_size=4))
def test_every_row_comes_back_in_order_and_once(
    batches: list[list[ProofRow]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("proofs") / "proofs.json"
    expected: list[ProofRow] = []
    for batch in batches:
        add_rows(batch, path)
        expected += [r for i, r in enumerate(batch) if r not in expected and r not in batch[:i]]
        assert list(read_rows(path)) == expected
        assert path.read_text(encoding="utf-8") == document(expected)


def test_the_newest_row_of_exactly_this_is_found(tmp_path: Path) -> None:
    path = tmp_path / "proofs.json"
    old, new = row(day="2026-01-01", verdict="fail"), row(day="2026-02-01")
    add_rows([new, old, row("k=q4_0,v=q4_0,fa=on")], path)
    proofs = Proofs(read_rows(path))
    subject = old.subject
    assert proofs.newest("certification", **PLACE, subject=subject) == new
    for key in PLACE:
        assert proofs.newest("certification", **(PLACE | {key: "another"}), subject=subject) is None
    assert proofs.newest("gate", **PLACE, subject=subject) is None
    again = row(day="2026-02-01", verdict="fail")
    add_rows([again], path)
    assert Proofs(read_rows(path)).newest("certification", **PLACE, subject=subject) == again
    assert again in Proofs(read_rows(path)).current("certification")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"schema": "kvtape.proofs/1"}', '{"schema": "kvtape.proofs/9", "rows": []}', "\x00"],
    ids=["empty", "torn", "list", "no-rows", "newer", "binary"],
)
def test_a_damaged_document_is_named_and_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "proofs.json"
    path.write_text(text)
    for act in (lambda: open_proofs(path), lambda: add_rows([row()], path)):
        with pytest.raises(UsageError, match=r"proofs\.json"):
            act()
    assert path.read_text() == text


def test_a_row_with_an_unknown_or_impossible_value_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "proofs.json"
    whole = json.loads(document([row()]))
    for key, value in (("verdict", "fine"), ("day", "30.11.2026"), ("new", 1), ("subject", "")):
        broken = {**whole, "rows": [{**whole["rows"][0], key: value}]}
        path.write_text(json.dumps(broken))
        with pytest.raises(UsageError, match=r"proofs\.json.*rows\.0"):
            open_proofs(path)


def test_a_failing_disk_leaves_the_old_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "proofs.json"
    add_rows([row()], path)
    before = path.read_text()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("kvtape.backends.user_files.os.fsync", full)
        with pytest.raises(OSError, match=r"proofs\.json"):
            add_rows([row("other")], path)
    assert path.read_text() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["proofs.json", "proofs.json.lock"]


def test_two_processes_lose_nothing_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "proofs.json"
    code = (
        "import sys; from pathlib import Path; from kvtape.backends.proofs.store import add_rows;"
        "from kvtape.backends.proofs.rows import ProofRow;"
        "[add_rows([ProofRow(kind='gate', model='m', fingerprint='f', engine='e', engine_version='1', machine='m',"
        " day='2026-01-01', subject=f'{sys.argv[2]}-{i}', verdict='pass')], Path(sys.argv[1])) for i in range(20)]"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(path), name]) for name in ("a", "b")]
    assert [w.wait(60) for w in writers] == [0, 0]
    subjects = [r.subject for r in read_rows(path)]
    assert sorted(subjects) == sorted(f"{name}-{i}" for name in "ab" for i in range(20))
    # Of each writer in the order in which it wrote.
    assert [s for s in subjects if s[0] == "a"] == [f"a-{i}" for i in range(20)]


def test_where_the_document_stands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTAPE_PROOFS", str(tmp_path / "own.json"))
    assert proofs_path() == tmp_path / "own.json"
    monkeypatch.delenv("KVTAPE_PROOFS")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert proofs_path() == tmp_path / "kvtape" / "proofs.json"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert proofs_path() == tmp_path / "home" / ".local" / "share" / "kvtape" / "proofs.json"


def test_what_is_shipped_reads_and_comes_before_the_users_own(tmp_path: Path) -> None:
    path = tmp_path / "proofs.json"
    add_rows([row()], path)
    assert open_proofs(path).rows == (*shipped_rows(), row())
    assert open_proofs(tmp_path / "none.json").rows == shipped_rows()


def test_a_measure_is_judged_by_its_bound() -> None:
    def verdict(value: float, **bound: float) -> str:
        return Measure.judged("quality", "kl", value, "nats", **bound).verdict

    assert (verdict(1, most=1), verdict(1.1, most=1)) == ("pass", "fail")
    assert (verdict(1, least=1), verdict(0.9, least=1)) == ("pass", "fail")
    assert (verdict(0, equal=0), verdict(1e-9, equal=0)) == ("pass", "fail")
    assert verdict(float("nan"), most=1) == "fail"
    assert Measure.judged("quality", "kl", float("inf"), "nats").value is None
    with pytest.raises(ValueError, match="one bound"):
        Measure.judged("quality", "kl", 1, "nats", most=1, least=0)


def test_the_worst_verdict_counts() -> None:
    good = Measure(ability="shift", name="a", verdict="pass")
    refused, bad = good.model_copy(update={"verdict": "refused"}), good.model_copy(update={"verdict": "fail"})
    assert verdict_of([]) is None
    assert verdict_of([good, refused]) == "refused"
    assert verdict_of([good, refused, bad]) == "fail"
    assert row(measures=(good,)).ability("shift") == "pass"
    assert row(measures=(good,)).ability("quality") is None


def test_the_machine_class_names_kernels_and_no_host() -> None:
    assert class_of("X86_64", ["fpu", "avx512f", "avx2"]) == "x86_64+avx2+avx512f"
    assert class_of("aarch64", []) == "aarch64"
    assert machine_class() == machine_class()
    assert speed_class().startswith(machine_class() + "/")
