"""`kvtape run` and `kvtape bench`: which engine is taken, what is refused, what comes out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvtape.backends.errors import UsageError
from kvtape.backends.reference.engines import registry as engines
from kvtape.backends.reference.engines.catalogue import EngineEntry
from kvtape.backends.reference.engines.engine import Contract
from kvtape.backends.reference.engines.registry import engine_entries, engine_names, make_engine, parse_engine
from kvtape.backends.reference.model.cached_loop import generate_cached
from kvtape.backends.reference.model.weights import Weights
from kvtape.capacity.model import read_model
from kvtape.cli import run_engine
from kvtape.cli.engine_choice import VARIABLE, chosen_engine
from support.command import Ran, kvtape
from support.ffn_host import served
from support.llama_tiny import engine as tiny_engine
from support.llama_tiny import model_file
from support.reference import SHAPES

PROMPT = "The librarian counted her books"


@pytest.fixture(autouse=True)
def _no_engine_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture(scope="module")
def tiny() -> Path:
    return model_file(**SHAPES["llama"])


def _run(tiny: Path, *args: object) -> dict[str, Any]:
    ran = kvtape("run", "--model", tiny, "--prompt", PROMPT, "--steps", 12, "--json", *args)
    assert ran.code == 0, ran.err
    body: dict[str, Any] = json.loads(ran.out)
    return body


def _bench(tiny: Path, *args: object) -> tuple[int, dict[str, Any]]:
    ran = kvtape("bench", "--model", tiny, "--json", *args)
    assert ran.out, ran.err
    return ran.code, json.loads(ran.out)


@pytest.mark.parametrize(
    ("engine", "kv_cache", "window", "variable", "spec", "source"),
    [
        (None, None, None, None, "standard", "default"),
        (None, None, None, "", "standard", "default"),
        (None, None, None, "tq3", "turbo-quant:bits=3", VARIABLE),
        (None, "standard", None, "tq3", "standard", "--kv-cache"),
        (None, "none", None, "nonsense", "no-cache", "--kv-cache"),
        (None, "markov-bounded", 64, None, "standard:window=64", "--kv-cache"),
        ("markov-rs:window=9", None, None, "nonsense", "markov-rs:window=9", "--engine"),
        ("full", "none", None, "tq3", "standard", "--engine"),
        ("off", "markov-bounded", 8, None, "no-cache", "--engine"),
    ],
)
def test_flag_over_variable_over_default(
    engine: str | None, kv_cache: str | None, window: int | None, variable: str | None, spec: str, source: str
) -> None:
    environment = {} if variable is None else {VARIABLE: variable}
    chosen = chosen_engine(engine, kv_cache, window, environment)
    assert (chosen.choice.spec, chosen.source) == (spec, source)
    both = engine is not None and kv_cache is not None
    assert chosen.warning == (
        f"--kv-cache {kv_cache} is not taken: --engine {engine} stands above it" if both else None
    )


@pytest.mark.parametrize(
    ("args", "variable", "message"),
    [
        (("apollo", None, None), "", "--engine: apollo is bench only"),
        (("apollo:layer=1", None, None), "", "kvtape bench --engine apollo"),
        ((None, None, None), "apollo", f"{VARIABLE}: apollo is bench only"),
        (
            (None, None, None),
            "standrad",
            f"{VARIABLE}: unknown engine 'standrad', did you mean 'standard'? allowed: apollo",
        ),
        (("tq5", None, None), "", "unknown engine 'tq5'"),
        ((None, "bounded", None), "", "allowed: markov-bounded, none, standard"),
        (("standard", "bounded", None), "", "unknown kind of --kv-cache 'bounded'"),
        ((None, "markov-bounded", None), "", "needs --context-window N"),
        ((None, "standard", 9), "", "write --engine standard:window=9"),
        ((None, None, 9), "", "--context-window is read by --kv-cache markov-bounded alone"),
    ],
)
def test_what_does_not_go_is_refused(
    args: tuple[str | None, str | None, int | None], variable: str, message: str
) -> None:
    with pytest.raises(UsageError) as refused:
        chosen_engine(*args, {VARIABLE: variable})
    assert message in str(refused.value)


def test_run_says_what_the_plain_loop_says(tiny: Path) -> None:
    """Three kinds of cache against the loop that is no engine, from the command line to the tokens."""
    model, tokens = Weights(tiny), tiny_engine(**SHAPES["llama"]).tokenize(PROMPT)
    free, bounded = generate_cached(model, tokens, 12), generate_cached(model, tokens, 12, 6)
    body = _run(tiny)
    assert (body["tokens"], body["engine"], body["engine_source"]) == (free, "standard", "default")
    assert (body["schema"], body["contract"], body["path"], body["router"]) == (
        "kvtape.run/1",
        "exact",
        "plain",
        "local",
    )
    assert (body["prompt_tokens"], body["completion_tokens"], body["decode_steps"]) == (len(tokens), 12, 11)
    assert (body["stopped"], body["stages"]) == ("steps", {"rows_computed": len(tokens) + 11})
    assert body["memory"]["rows"] == len(tokens) + 11
    assert body["prefill_tokens_s"] > 0
    assert body["decode_tokens_s"] > 0
    assert _run(tiny, "--kv-cache", "none")["tokens"] == free
    windowed = _run(tiny, "--kv-cache", "markov-bounded", "--context-window", 6)
    ends = read_model(tiny).end_tokens
    stop = next((i for i, token in enumerate(bounded) if token in ends), 12)
    assert (windowed["tokens"], windowed["window_tokens"]) == (bounded[:stop], 6)
    assert windowed["stopped"] == ("end" if stop < 12 else "steps")
    assert bounded[:stop] != free[:stop]


def test_both_flags_are_a_warning_and_the_variable_is_read(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = kvtape(
        "run", "--model", tiny, "--prompt", PROMPT, "--steps", 2, "--engine", "tq4", "--kv-cache", "none", "--json"
    )
    assert ran.err == "kvtape: --kv-cache none is not taken: --engine tq4 stands above it\n"
    body = json.loads(ran.out)
    assert (body["engine"], body["warnings"]) == ("turbo-quant", [ran.err.removeprefix("kvtape: ").strip()])
    monkeypatch.setenv(VARIABLE, "markov-rs:window=4")
    assert _run(tiny)["engine"] == "markov-rs:window=4"
    assert _run(tiny, "--engine", "tq3")["engine_source"] == "--engine"


def test_run_on_packed_weights_and_at_a_server() -> None:
    path = model_file("llama", n_head=4, n_head_kv=2, head_dim=32, weights="q8_0")
    plain, packed = _run(path), _run(path, "--packed")
    assert packed["tokens"] == plain["tokens"]
    assert (plain["path"], plain["tiles_unpacked"], packed["path"]) == ("plain", 0, "resident")
    assert packed["tiles_unpacked"] > 0
    with served(Weights(path)) as server:
        remote = _run(path, "--ffn", server.url)
    assert (remote["tokens"], remote["router"]) == (plain["tokens"], f"remote {server.url}")
    assert remote["digest"] != plain["digest"]


def test_run_ends_where_the_model_ends(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = _run(tiny)["tokens"]
    assert free.index(free[4]) == 4
    generate = run_engine._generate
    monkeypatch.setattr(
        run_engine, "_generate", lambda h, p, n, ends, clock: generate(h, p, n, frozenset({free[4]}), clock)
    )
    body = _run(tiny)
    assert (body["tokens"], body["stopped"], body["decode_steps"]) == (free[:4], "end", 4)


def test_run_prints_the_text_first(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    ran = kvtape("run", "--model", tiny, "--prompt-file", file, "--steps", 12)
    assert ran.out.startswith(_run(tiny)["text"].split("\n")[0])
    assert "\nengine\tstandard\n" in ran.out
    assert "kv bytes\t" in ran.out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt", "x", "--prompt-file", "y"], "give one of --prompt and --prompt-file"),
        ([], "give one of --prompt and --prompt-file"),
        (["--prompt", "  "], "the text is empty"),
        (["--prompt-file", "nowhere.txt"], "no such file"),
        (["--prompt", "x", "--engine", "apollo"], "apollo is bench only"),
        (["--prompt", "x", "--engine", "standard:windw=3"], "did you mean 'window'? allowed: window, window_rule"),
        (["--prompt", "x", "--steps", "1000000"], "tokens do not fit a context of"),
        (["--prompt", "x", "--ffn", "ftp://x"], "http"),
    ],
)
def test_run_refuses_in_one_line(tiny: Path, args: list[str], message: str) -> None:
    ran = kvtape("run", "--model", tiny, *args)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert message in ran.err


def test_bench_lists_everything_that_the_parser_accepts(tiny: Path) -> None:
    body = json.loads(kvtape("bench", "--list", "--json").out)
    listed = [name for e in body["engines"] for name in (e["engine"], *e["aliases"])]
    assert sorted(listed) == engine_names()
    labels = {e["engine"]: {k for k in ("quadratic", "experimental", "bench_only") if e[k]} for e in body["engines"]}
    assert labels["no-cache"] == {"quadratic"}
    assert labels["apollo"] == {"experimental", "bench_only"}
    assert labels["standard"] == set()
    table = kvtape("bench", "--list").out
    assert "no-cache\texact, O(n^2)\t" in table
    assert "exact (with window=N: exact in window)" in table
    assert "tq3 = turbo-quant:bits=3" in table


def test_the_help_of_bench_says_what_each_engine_promises() -> None:
    text = " ".join(kvtape("bench", "--help").out.split())
    for entry in engine_entries():
        assert f"{entry.name} {entry.contract}" in text
        assert f": {entry.about}." in text
        assert all(alias in text for alias in entry.aliases)
        assert all(f"{key}=" in text for key in entry.options)
    for contract in Contract:
        assert f"{contract} {contract.promise}" in text


def test_bench_says_what_each_engine_is_beside_standard(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "nonsense")
    specs = ["standard", "no-cache", "tq3", "apollo:layer=1"]
    args = [word for spec in specs for word in ("--engine", spec)]
    args += ["--prompts", "2", "--prompt-tokens", "40", "--steps", "6"]
    (code, body), (_, again) = _bench(tiny, *args), _bench(tiny, *args)
    assert code == 0
    assert [row["engine"] for row in body["rows"]] == ["standard", "no-cache", "turbo-quant:bits=3", "apollo:layer=1"]
    assert (body["prompts"], body["steps"], body["prompt_tokens"], body["forced_by"]) == (2, 6, 80, "text")
    standard, bare, coded, apollo = body["rows"]
    for row in (standard, bare):
        assert (row["kept"], row["mean_kl"], row["served_rate"], row["match_rate"]) == (True, 0, 1, 1)
        assert (row["path"], row["identical_steps"]) == ("plain", 14)
    assert (bare["quadratic"], standard["quadratic"]) == (True, False)
    assert [kind["kind"] for kind in standard["memory"]["kinds"]] == ["kv"]
    assert [kind["kind"] for kind in bare["memory"]["kinds"]] == ["tokens"]
    assert coded["mean_kl"] > 0
    assert coded["kept"] is True
    assert min(coded["key_cosine"], coded["value_cosine"]) > coded["bound"] - 0.01
    assert (apollo["contract"], apollo["kept"], apollo["bench_only"]) == ("task", None, True)
    assert all(row["decode_tokens_s"] > 0 and row["step_times"] > 0 for row in body["rows"] if row["served"] > 2)
    assert body["digest"] == again["digest"]


def test_bench_says_which_path_ran() -> None:
    path = model_file("llama", n_head=4, n_head_kv=2, head_dim=32, weights="q8_0")
    args = ["--engine", "boundary-kv", "--prompt", PROMPT, "--steps", "4"]
    (_, plain), (_, packed) = _bench(path, *args), _bench(path, *args, "--packed")
    assert (plain["forced_by"], plain["rows"][0]["path"], plain["rows"][0]["tiles_unpacked"]) == (
        "standard",
        "plain",
        0,
    )
    assert packed["rows"][0]["path"] == "resident"
    # A prefill and four steps through the layers (7 matrices each), five choices through the head; one tile each.
    n_layer = Weights(path).architecture.n_layer
    assert packed["rows"][0]["tiles_unpacked"] == 5 * 7 * n_layer + 5
    assert packed["packed_matrices"] == packed["matrices"] == 7 * n_layer + 2
    assert packed["rows"][0]["kept"] is True


def test_a_broken_promise_is_exit_1(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = _with_a_liar(tiny, monkeypatch, Contract.EXACT)
    assert ran.code == 1
    assert "liar\texact\t-\tBROKEN\t" in ran.out
    assert _with_a_liar(tiny, monkeypatch, Contract.TASK).code == 0


def _with_a_liar(tiny: Path, monkeypatch: pytest.MonkeyPatch, contract: Contract) -> Ran:
    """An engine that forgets what is 8 tokens old."""
    standard = engine_entries()[0]

    def make(info: Any, options: Any) -> Any:
        engine = make_engine(parse_engine("standard:window=8"))
        engine.info = replace(info, contract=contract)  # type: ignore[misc]
        return engine

    liar = EngineEntry("liar", {}, contract, make, "forgets")
    with monkeypatch.context() as patch:
        patch.setattr(engines, "engine_entries", lambda: (standard, liar))
        return kvtape("bench", "--model", tiny, "--engine", "liar", "--prompt", PROMPT, "--steps", 4)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "name engines with --engine (apollo, "),
        (["--engine", "tq9"], "unknown engine 'tq9'"),
        (["--engine", "tq4", "--prompt", "a", "--prompts", "3"], "--prompt gives whole prompts"),
        (["--engine", "tq4", "--prompt", "a", "--force", "text"], "--prompt gives whole prompts"),
        (["--engine", "tq4", "--prompt", " "], "--prompt: the text is empty"),
        (["--engine", "tq4", "--force", "me"], "allowed: greedy, text"),
        (["--engine", "tq4", "--prompts", "1000"], "essay: "),
        (["--engine", "tq4", "--prompt", "a", "--steps", "100000"], "do not fit a context of"),
    ],
)
def test_bench_refuses_in_one_line(tiny: Path, args: list[str], message: str) -> None:
    ran = kvtape("bench", "--model", tiny, *args)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert message in ran.err


def test_an_engine_that_serves_nothing_is_exit_1_and_says_why(tiny: Path) -> None:
    ran = kvtape("bench", "--model", tiny, "--engine", "apollo", "--prompt", PROMPT, "--steps", 2)
    assert ran.code == 1
    assert "layer=30 of a model whose layers are 0..1" in ran.out
