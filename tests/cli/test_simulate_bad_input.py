"""Workloads, costs and machines that cannot be: a refusal of one line, or an outcome that is counted. Never a hang."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtape.cli import recording
from kvtape.sim.world import running
from kvtape.traces.reader import open_log
from support.command import Ran, kvtape
from support.forge import edit_log

ROOF = "flops=1e12,bytes_per_s=1e11,params=1e9,weight_bytes=1e9,row_bytes=1000"


def request(at: object, n: int = 1024, out: int = 30, ids: str = "[1, 2]") -> str:
    return f'{{"timestamp": {at}, "input_length": {n}, "output_length": {out}, "hash_ids": {ids}}}\n'


def imported(folder: Path, text: str, more: str = "mooncake") -> tuple[Ran, Path]:
    trace, log = folder / "trace.jsonl", folder / "trace.duckdb"
    trace.write_text(text, encoding="utf-8")
    return kvtape("import", trace, "--format", more, "--log", log), log


@pytest.fixture(scope="module")
def roof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("roof") / "costs.json"
    assert kvtape("calibrate", "--roofline", ROOF, "--out", path).code == 0
    return path


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ran, log = imported(tmp_path_factory.mktemp("trace"), request(0) + request(700, ids="[1, 3]") + request(900))
    assert ran.code == 0, ran.err
    return log


def simulated(log: Path, costs: Path, *more: object) -> dict[str, Any]:
    ran = kvtape("simulate", log, "--costs", costs, "--policy", "none", *more, "--json")
    assert ran.code == 0, ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no request"),
        ("\n\n", "no request"),
        (request("NaN"), "line 1"),
        (request(5) + request("-1"), "line 2"),
        (request("Infinity"), "line 1"),
        (request("1e400"), "line 1"),
        (request('"soon"'), "line 1"),
        (request(0, n=-5), "line 1"),
    ],
)
def test_a_trace_without_sense_is_refused_and_leaves_nothing(tmp_path: Path, text: str, words: str) -> None:
    ran, log = imported(tmp_path, text)
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert not log.exists()


def test_a_trace_out_of_order_is_put_in_order_of_its_times(tmp_path: Path, roof: Path) -> None:
    ran, log = imported(tmp_path, request(900) + request(100, ids="[8, 9]"))
    assert ran.code == 0, ran.err
    turns = simulated(log, roof, "--n-ctx", 4096)["turns"]
    assert [t["arrived_ns"] for t in turns] == [0, 800_000_000]


def test_a_log_without_requests_is_refused(trace: Path, roof: Path, tmp_path: Path) -> None:
    empty = edit_log(trace, tmp_path / "empty.duckdb", ["DELETE FROM events WHERE op <> 'open'"], rechain=False)
    ran = kvtape("simulate", empty, "--costs", roof, "--policy", "none", "--n-ctx", 64)
    assert (ran.code, "no prompt" in ran.err) == (2, True)


def test_a_log_whose_time_goes_back_is_refused(log: Path, roof: Path, tmp_path: Path) -> None:
    with open_log(log) as tape:
        at = next(e.seq for e in tape.events(tape.default_run().run_id, "main") if e.op == "generate")
    forged = edit_log(log, tmp_path / "back.duckdb", [f"UPDATE events SET at_ns = 0 WHERE seq = {at}"], rechain=True)
    ran = kvtape("simulate", forged, "--costs", roof)
    assert (ran.code, "time goes back" in ran.err) == (2, True)


def test_json_lines_with_times_that_are_none_are_refused(log: Path, tmp_path: Path) -> None:
    lines = tmp_path / "log.jsonl"
    assert kvtape("export", log, "--format", "jsonl", "--out", lines).code == 0
    text = lines.read_text(encoding="utf-8")
    for bad in ("-1", "NaN", "1.5", str(2**64)):
        changed, n = re.subn(r'"at_ns": ?[0-9]+', f'"at_ns":{bad}', text, count=1)
        assert n == 1
        ran, made = imported(tmp_path, changed, "kvtape-jsonl")
        assert (ran.code, "line" in ran.err) == (2, True), ran.err
        assert not made.exists()


CANNOT_BE = [
    (["--policy", "stream:sink=4"], "recent"),
    (["--policy", "lru:budget=9"], "unknown policy"),
    (["--policy", "nowhere:function,budget=64"], "nowhere"),
    (["--slots", "0"], "slot"),
    (["--link", "0"], "moves nothing"),
    (["--memory", "0"], "memory"),
    (["--pace", "0"], "pace"),
    (["--pace", "nan"], "pace"),
    (["--pace", "1e-300"], "292 years"),
    (["--link-latency", "nan"], "--link-latency"),
    (["--link-latency", "-1"], "--link-latency"),
    (["--link-latency", "5"], "without a link"),
    (["--sample-seed", "5"], "draws nothing by itself"),
    (["--slot-dies", "never"], "slot failure"),
    (["--slot-dies", "1:9"], "slots 0 to 2"),
    (["--slot-dies", "1:" + "9" * 5000], "slot failure"),
    (["--slot-dies", "1e400"], "292 years"),
    (["--slot-dies", "1e999999999"], "292 years"),
    (["--slots", "99999999999999"], "at most 2147483647"),
    (["--n-ctx", "9" * 30], "at most 2147483647"),
    (["--cold-tokens", "9" * 30], "at most 2147483647"),
    (["--sample", "0"], "at least 1"),
    (["--sample-sessions", "2"], "share"),
]


@pytest.mark.parametrize(("more", "words"), CANNOT_BE)
def test_a_machine_that_cannot_be_is_refused(
    trace: Path, roof: Path, tmp_path: Path, more: list[str], words: str
) -> None:
    policy = [] if "--policy" in more else ["--policy", "none"]
    out = tmp_path / "out.duckdb"
    ran = kvtape("simulate", trace, "--costs", roof, "--n-ctx", 4096, *policy, "--log", out, *more)
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_machine_of_more_slots_than_anybody_has_costs_nothing(trace: Path, roof: Path) -> None:
    many = simulated(trace, roof, "--n-ctx", 4096, "--slots", 2**31 - 1, "--slot-dies", "0:2147483646")
    own = simulated(trace, roof, "--n-ctx", 4096)
    assert many["figures"] == own["figures"] | {"slots_failed": 1}


def test_a_log_that_another_began_meanwhile_is_left_alone(
    trace: Path, roof: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.duckdb"
    asked = ["simulate", trace, "--costs", roof, "--policy", "none", "--n-ctx", 4096, "--log", out]
    assert kvtape(*asked).code == 0
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(recording, "require_new", lambda log: None)
    ran = kvtape(*asked)
    assert (ran.code, "already there" in ran.err) == (2, True), ran.err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files


def change(costs: Path, to: Path, how: Callable[[dict[str, Any]], None]) -> Path:
    value = json.loads(costs.read_text(encoding="utf-8"))
    how(value)
    to.write_text(json.dumps(value), encoding="utf-8")
    return to


def rate(value: float) -> Callable[[dict[str, Any]], None]:
    def how(costs: dict[str, Any]) -> None:
        costs["kinds"]["prefill"]["terms"][0]["rate"] = value

    return how


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (rate(float("nan")), "not finite"),
        (rate(-1.0), "negative"),
        (rate(1e300), "292 years"),
        (lambda c: c.update(schema="other/1"), "schema"),
        (lambda c: c["kinds"].pop("prefill"), "say nothing of prefill"),
        (lambda c: c.update(kinds=[]), "damaged"),
        (lambda c: c["kinds"]["prefill"].update(fit="good"), "damaged"),
        (lambda c: c["kinds"]["prefill"].update(terms="abc"), "damaged"),
        (lambda c: c["kinds"]["prefill"]["terms"][0].update(rate=True), "no number"),
        (lambda c: c["origin"].update(row_bytes=None), "row_bytes is None"),
        (lambda c: c["origin"].update(row_bytes=1.5), "row_bytes is 1.5"),
        (lambda c: c["origin"].update(row_bytes=-5), "cannot be negative"),
        (lambda c: c["origin"].update(model_fingerprint=7), "model_fingerprint is 7"),
        (lambda c: c["origin"].update(logs=7), "logs is 7"),
        (lambda c: c["origin"].update(mood="good"), "mood"),
    ],
)
def test_costs_without_sense_are_refused(
    trace: Path, roof: Path, tmp_path: Path, how: Callable[[dict[str, Any]], None], words: str
) -> None:
    costs = change(roof, tmp_path / "bad.json", how)
    ran = kvtape("simulate", trace, "--costs", costs, "--policy", "none", "--n-ctx", 4096)
    assert ran.code == 2
    assert words in ran.err
    assert len(ran.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"9" * 5000, b"\xff\xfe", b""], ids=["deep", "long", "bytes", "empty"]
)
def test_costs_and_grids_that_are_no_json_are_refused(trace: Path, roof: Path, tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text)
    for args in (["simulate", trace, "--costs", path], ["whatif", trace, "--costs", roof, "--grid", path]):
        ran = kvtape(*args)
        assert (ran.code, "not JSON" in ran.err, ran.err.count("\n")) == (2, True, 1)


def test_costs_of_another_model_are_refused(log: Path, roof: Path, tmp_path: Path) -> None:
    def other(costs: dict[str, Any]) -> None:
        costs["origin"] |= {"hypothetical": False, "model_fingerprint": "llama/other", "model_name": "other.gguf"}

    costs = change(roof, tmp_path / "other.json", other)
    ran = kvtape("simulate", log, "--costs", costs)
    assert (ran.code, "the costs are of other.gguf" in ran.err) == (2, True)


def test_a_decode_longer_than_the_context_is_cut_short_and_counted(trace: Path, roof: Path) -> None:
    body = simulated(trace, roof, "--n-ctx", 1030)
    assert body["figures"]["cut_short"] == 3
    assert body["figures"]["generated_tokens"] < 3 * 30


def test_a_session_longer_than_its_context_or_than_the_memory_is_counted(trace: Path, roof: Path) -> None:
    figures = simulated(trace, roof, "--n-ctx", 512)["figures"]
    assert (figures["refused"], figures["served"]) == (3, 0)
    body = simulated(trace, roof, "--n-ctx", 4096, "--memory", "1MiB")
    assert body["figures"]["unserved"] == 3
    assert {t["outcome"] for t in body["turns"]} == {"unserved"}
    assert all("more than the memory has" in t["why"] for t in body["turns"])


def test_a_link_of_one_byte_a_second_takes_its_time_and_ends(trace: Path, roof: Path) -> None:
    stream = ["--policy", "stream:sink=4,recent=252", "--n-ctx", 512, "--cold-tokens", 512]
    body = simulated(trace, roof, *stream, "--link", "1")
    assert body["figures"]["served"] == 3
    assert body["figures"]["link_busy_ns"] == body["figures"]["link_bytes"] * 10**9 > 0


def test_a_world_that_stands_still_is_ended_by_the_watchdog(
    trace: Path, roof: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spin(self: Any) -> Any:
        while True:
            yield self._world.env.timeout(0)

    monkeypatch.setattr(running, "_STEPS_WITHOUT_TIME", 100)
    monkeypatch.setattr(running._Tenant, "live", spin)
    ran = kvtape("simulate", trace, "--costs", roof, "--policy", "none", "--n-ctx", 4096)
    assert (ran.code, "stands still" in ran.err) == (1, True)
