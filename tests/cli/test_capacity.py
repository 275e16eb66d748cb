"""`kvtape capacity`: numbers by hand, stable keys, errors that say what to do, a plot that repeats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.command import Ran, kvtape
from support.known_models import keys_of
from support.read_svg import read_svg
from support.tiny_gguf import write_tiny

KEYS = (
    "model_max", "request", "effective", "memory_tokens", "hot", "planner", "clamp_reason", "rule", "caches",
)  # fmt: skip


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """28 layers, 2 KV heads of 128: 28,672 bytes a token in f16."""
    path = tmp_path_factory.mktemp("keys") / "qwen.json"
    path.write_text(json.dumps(keys_of("Qwen2.5-Coder-1.5B")))
    return path


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "gemma.json"
    path.write_text(json.dumps(keys_of("gemma-3-270m")))
    return path


def asked(*args: object, code: int = 0) -> dict[str, Any]:
    ran = kvtape("capacity", *args, "--json")
    assert (ran.code, ran.err) == (code, "")
    body: dict[str, Any] = json.loads(ran.out)
    return body


def test_sizes_alone(qwen: Path) -> None:
    body = asked("--metadata", qwen)
    assert set(KEYS) <= set(body)
    assert (body["model_max"], body["effective"], body["memory_tokens"], body["request"]) == (32768, 32768, None, None)
    assert body["marginal_bytes"] == 28_672
    assert body["ideal_bytes"] == body["allocated_bytes"] == body["peak_bytes"] == 28_672 * 32768
    assert body["caches"] == [
        {"part": "full", "layers": 28, "cells": 32768, "streams": 1, "k_mib": 448.0, "v_mib": 448.0, "total_mib": 896.0}
    ]
    assert body["clamp_reason"] is None


def test_what_a_memory_holds(qwen: Path) -> None:
    body = asked("--metadata", qwen, "--memory", "1GiB", "--weights", "400MiB", "--overhead", "100MiB")
    room = int(2**30 * 0.9) - 500 * 2**20
    assert body["cache_budget_bytes"] == room
    assert body["memory_tokens"] == room // 28_672 // 256 * 256 == body["effective"]
    assert body["clamp_reason"] == "model_context_exceeds_memory_budget"
    smaller = asked("--metadata", qwen, "--memory", "1GiB", "--weights", "400MiB", "--ctx", 5000)
    assert (smaller["request"], smaller["effective"], smaller["n_ctx"], smaller["clamp_reason"]) == (
        5000, 5000, 5120, None,
    )  # fmt: skip
    assert any("rounds 5000 tokens up to 5120" in note for note in smaller["assumptions"])
    larger = asked("--metadata", qwen, "--memory", "1GiB", "--weights", "400MiB", "--ctx", 32000)
    assert larger["clamp_reason"] == "request_exceeds_memory_budget"


def test_memory_for_more_than_the_model_was_trained_for(qwen: Path, tmp_path: Path) -> None:
    body = asked("--metadata", qwen, "--memory", "100GiB", "--weights", "1GiB", "--ctx", 4096)
    room = int(100 * 2**30 * 0.9) - 2**30
    assert body["memory_tokens"] == room // 28_672 // 256 * 256 > body["model_max"] == 32768
    assert (body["effective"], body["clamp_reason"]) == (4096, None)
    states = {"block_count": 4, "embedding_length": 256, "context_length": 2048}
    states |= {"ssm.conv_kernel": 4, "ssm.inner_size": 512, "ssm.state_size": 16}
    path = tmp_path / "mamba.json"
    path.write_text(json.dumps({"general.architecture": "mamba"} | {f"mamba.{k}": v for k, v in states.items()}))
    body = asked("--metadata", path, "--memory", "1GiB")
    assert (body["memory_tokens"], body["effective"]) == (2048, 2048)
    assert asked("--metadata", path, "--memory", "100KiB", code=1)["memory_tokens"] == 0


def test_reserve_limit_hot_and_cold(qwen: Path) -> None:
    body = asked(
        *("--metadata", qwen, "--memory", "4GiB", "--reserve", "1GiB", "--limit", "1GiB", "--reserved", "500MiB"),
        *("--weights", 1, "--ctx", 20000, "--hot", 1024, "--cold", "28672kB"),
    )
    assert body["memory_tokens"] == (int((2**30 - 500 * 2**20) * 0.9) - 1) // 28_672 // 256 * 256
    assert (body["clamp_reason"], body["hot"], body["planner"]) == ("request_exceeds_user_limit", 1024, 2024)
    below = asked("--metadata", qwen, "--memory", "1GiB", "--reserve", "2GiB", code=1)
    assert (below["clamp_reason"], below["effective"], below["caches"]) == ("device_free_memory_below_reserve", 0, [])
    assert any("nothing fits" in note for note in below["assumptions"])


def test_windows_slots_types_and_engines(gemma: Path) -> None:
    body = asked("--metadata", gemma, "--ctx", 1024, "--slots", 3, "--separate")
    assert [(p["part"], p["cells"], p["streams"]) for p in body["caches"]] == [("full", 512, 3), ("swa", 512, 3)]
    assert sum(p["total_mib"] for p in body["caches"]) == 27.0
    assert (body["n_ctx"], body["per_sequence"], body["request"]) == (1536, 512, 1024)
    shared = asked("--metadata", gemma, "--ctx", 1024, "--slots", 4, "--unified")
    assert (shared["n_ctx"], shared["per_sequence"]) == (1024, 1024)
    assert any("can overflow it" in note for note in shared["assumptions"])
    q8 = asked("--metadata", gemma, "--ctx", 8192, "--kv-type", "q8_0", "--kv-type-v", "q4_0")
    full = q8["caches"][0]
    assert (full["k_mib"], full["v_mib"]) == (12 * 34 / 64, 12 * 18 / 64)
    old = asked("--metadata", gemma, "--engine", "llama.cpp@b5000")
    assert [p["part"] for p in old["caches"]] == ["full"]
    assert old["rule"].startswith("llama.cpp@b0:")
    assert old["engine"] == "llama.cpp@b5000"
    whole = asked("--metadata", gemma, "--swa-full")
    assert [p["cells"] for p in whole["caches"]] == [32768, 32768]


def test_the_engine_is_by_default_what_runs_the_model(tmp_path: Path, gemma: Path) -> None:
    """A folder of OpenVINO is not sized as llama.cpp would."""
    names = "".join(f'<data variable_id="past.0.{role}" variable_shape="?,2,?,64"/>' for role in ("key", "value"))
    (tmp_path / "openvino_model.xml").write_text(f"<net>{names}</net>")
    body = asked(tmp_path, "--ctx", 100)
    assert (body["engine"], body["kv_type_k"], body["allocated_bytes"]) == ("openvino", "u8", 100 * 2 * 2 * (64 + 8))
    assert asked("--metadata", gemma)["engine"] == "llama.cpp"


def test_a_latent_cache_of_two_types_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(keys_of("DeepSeek-V3/R1 MLA (fork)", context_length=4096)))
    for types, noted in ((("--kv-type", "q8_0"), False), (("--kv-type-k", "q8_0"), True)):
        notes = asked("--metadata", path, *types)["assumptions"]
        assert any("#25871" in note for note in notes) == noted


def test_per_sequence_and_total_are_apart(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(keys_of("Llama-3.1-8B", context_length=262144)))
    body = asked("--metadata", path, "--ctx", 524288, "--slots", 2)
    assert (body["n_ctx"], body["per_sequence"], body["model_max"]) == (524288, 262144, 262144)
    assert body["context_limit"] == 524288


def test_a_model_file_brings_its_weights(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    body = asked(path, "--memory", "1GiB")
    assert 0 < body["weights_bytes"] < path.stat().st_size
    assert body["model"] == "m.gguf"
    assert asked(path, "--memory", "auto")["memory_tokens"] > 0


@pytest.mark.parametrize("backend", ["llama", "openvino"])
def test_record_serves_what_the_memory_holds(tmp_path: Path, backend: str) -> None:
    model = write_tiny(tmp_path / "m.gguf", "llama", n_ctx=2048)
    (tmp_path / "text.txt").write_text("the cache holds the keys and the values " * 8)
    common = ("record", "--model", model, "--backend", backend, "--text", tmp_path / "text.txt", "--decode", 4)
    policy = ("--policy", "stream:sink=4,recent=60")
    log = tmp_path / "log.duckdb"
    assert kvtape(*common, *policy, "--memory", "auto", "--log", log).code == 0
    rows = json.loads(kvtape("sql", log, "SELECT n_ctx_asked, n_ctx FROM sessions", "--json").out)["rows"]
    assert rows == [{"n_ctx_asked": 2048, "n_ctx": 2048}]
    small = tmp_path / "small.duckdb"
    assert kvtape(*common, *policy, "--memory", "2200KiB", "--log", small).code == 0
    (row,) = json.loads(kvtape("sql", small, "SELECT n_ctx_asked, n_ctx FROM sessions", "--json").out)["rows"]
    assert row["n_ctx_asked"] == 2048
    assert 256 <= row["n_ctx"] < 2048
    refused = kvtape(*common, *policy, "--memory", "100KiB", "--log", tmp_path / "none.duckdb")
    assert (refused.code, "give at least" in refused.err, (tmp_path / "none.duckdb").exists()) == (2, True, False)


def test_tables_for_people(gemma: Path) -> None:
    ran = kvtape("capacity", "--metadata", gemma, "--memory", "30MiB")
    assert ran.code == 0
    for text in ("memory holds\t", "served\t", "swa\t15\t", "clamped: model_context", "rule: llama.cpp@b"):
        assert text in ran.out


def test_the_plot_is_of_the_numbers_and_repeats_byte_by_byte(gemma: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "a.svg", tmp_path / "b.svg"
    for path in (first, second):
        ran = kvtape("capacity", "--metadata", gemma, "--memory", "60MiB", "--plot", path, "--json")
        assert ran.code == 0
    body = json.loads(ran.out)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.svg", "b.svg"]
    picture = read_svg(first.read_text(encoding="utf-8"))
    for text in ("window of 512 full", "memory for the cache: 54.00 MiB", f"served: {body['effective']}"):
        assert text in picture.texts
    x, y = picture.across("context, tokens"), picture.up("KV cache, MiB")
    allocated, ideal = picture.of("polyline")
    assert picture.key("allocated by the engine").classes == allocated.classes
    assert picture.key("ideal, one sequence").classes == ideal.classes
    for curve, key in ((allocated, "allocated_bytes"), (ideal, "ideal_bytes")):
        contexts, sizes = zip(*((x(a), y(b)) for a, b in curve.points), strict=True)
        assert list(contexts) == sorted(contexts)
        assert list(sizes) == sorted(sizes)
        assert contexts[-1] == pytest.approx(body["model_max"], rel=0.005)
        assert np.interp(body["effective"], contexts, sizes) == pytest.approx(body[key] / 2**20, rel=0.01)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give one of MODEL and --metadata"),
        (["{gemma}", "--metadata", "{gemma}"], "give one of MODEL and --metadata"),
        (["{gemma}"], "not a GGUF file"),
        (["none.gguf"], "no such model file"),
        (["--metadata", "none.json"], "no such metadata file"),
        (["--metadata", "{gemma}", "--memory", "6 apples"], "'6 apples' is no size; write bytes"),
        (["--metadata", "{gemma}", "--memory", "-5"], "is no size"),
        (["--metadata", "{gemma}", "--kv-type", "q9"], "choose from bf16"),
        (["--metadata", "{gemma}", "--kv-type-v", "q8_0", "--no-flash-attn"], "without flash attention"),
        (["--metadata", "{gemma}", "--engine", "vllm"], "choose from llama.cpp"),
        (["--metadata", "{gemma}", "--limit", "1GiB"], "give its size with --memory"),
        (["--metadata", "{gemma}", "--slots", "300"], "256 at most"),
    ],
)
def test_what_cannot_be_answered_is_one_line_and_code_2(args: list[str], message: str, gemma: Path) -> None:
    ran = kvtape("capacity", *(a.replace("{gemma}", str(gemma)) for a in args))
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
    assert len(ran.err.splitlines()) == 1


def test_a_model_without_a_trained_context_needs_one(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(keys_of("Llama-2-7B")))
    ran: Ran = kvtape("capacity", "--metadata", path)
    assert (ran.code, "give one with --ctx" in ran.err) == (2, True)
    assert asked("--metadata", path, "--ctx", 700)["effective"] == 700


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--weights", "1GiB", "--overhead", "77MiB", "--headroom", "0.07"],
        ["--reserve", "333MiB", "--slots", 3],
        ["--engine", "openvino"],
        ["--limit", "64GiB", "--reserved", "1GiB"],
    ],
)
def test_where_nothing_fits_the_smallest_memory_that_would_do_is_named(qwen: Path, more: list[object]) -> None:
    nothing = asked("--metadata", qwen, "--memory", "1kB", *more, code=1)
    least = nothing["least_memory_bytes"]
    assert nothing["effective"] == 0
    assert any(f"({least} bytes" in note for note in nothing["assumptions"])
    assert asked("--metadata", qwen, "--memory", least, *more)["effective"] > 0
    assert asked("--metadata", qwen, "--memory", least, *more)["least_memory_bytes"] is None
    assert asked("--metadata", qwen, "--memory", least - 1, *more, code=1)["least_memory_bytes"] == least


def test_where_the_limit_holds_nothing_the_limit_is_named(qwen: Path) -> None:
    ran = kvtape("capacity", "--metadata", qwen, "--memory", "64GiB", "--limit", "1kB", "--weights", "1GiB")
    assert ran.code == 1
    assert "and a limit of 1.12 GiB" in ran.out
    assert "\n0" not in ran.out
