"""The whole capability struct of every engine and configuration: one table, asserted, executed, and in the docs.

A row is a tiny model and what is asked of a session on it; what is not asked is f32 rows, a cold budget and no scores.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kvtape.backends.protocol import Backend, Engine, SessionConfig
from kvtape.planner.capabilities import Capabilities
from support.engines import load_engine
from support.openvino_ir import tiny_ir
from support.tiny_gguf import write_tiny
from support.tiny_latent import write_tiny_latent

__all__ = [
    "FLAGS",
    "FULL",
    "NO_SHIFT",
    "REFUSED",
    "ROWS",
    "Refused",
    "Row",
    "config_of",
    "engine_of",
    "open_row",
    "table",
]

FLAGS = tuple(f.name for f in fields(Capabilities) if isinstance(f.default, bool))
"""All that are true or false; the sliding window is a number of tokens."""

FULL = Capabilities(
    remove_tail=True,
    remove_middle=True,
    position_shift=True,
    sparse_attention=False,
    sliding_window_attention_tokens=0,
    cold_store=True,
    recompute_range=True,
    attention_scores=False,
    snapshot_state=True,
)
SCORED = replace(FULL, attention_scores=True)
NO_SHIFT = replace(FULL, position_shift=False)
SCORED_NO_SHIFT = replace(SCORED, position_shift=False)
NO_COLD = replace(FULL, cold_store=False)
STATE_ONLY = Capabilities(snapshot_state=True)
WINDOWED = Capabilities(remove_middle=True, sliding_window_attention_tokens=64, snapshot_state=True)
WHOLE_WINDOW = replace(NO_COLD, sliding_window_attention_tokens=64)
NO_MIRROR = Capabilities(recompute_range=True, snapshot_state=True)

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """A configuration, in words `of`, and the struct it must report.

    `model` goes to the writer of tiny models, `config` to the session.
    """

    engine: str
    of: str
    expected: Capabilities
    model: Settings = field(default_factory=dict)
    config: Settings = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.engine}-{self.of.replace(', ', '-').replace(' ', '_')}"


@dataclass(frozen=True)
class Refused:
    """A configuration that no session can have, and a pattern of the UsageError that says so."""

    engine: str
    of: str
    why: str
    model: Settings = field(default_factory=dict)
    config: Settings = field(default_factory=dict)


def kv(kv_type: str) -> dict[str, Any]:
    return {"kv_type_k": kv_type, "kv_type_v": kv_type}


def packed(k: str, v: str, flash: str = "on", **options: str) -> dict[str, Any]:
    return {"kv_type_k": k, "kv_type_v": v, "flash_attention": flash} | on(**options)


def on(**options: str) -> dict[str, Any]:
    return {"options": options}


def _llama() -> list[Row]:
    llama, yarn, latent = {}, {"yarn": 4}, {"arch": "latent"}
    swa, scores, plain_kv = on(swa_full="yes"), on(scores="on"), ("f32", "f16")
    wide = {"n_embd": 128, "n_head": 2, "n_head_kv": 1, "head_dim": 64}
    narrow, allowed = ("q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"), {"shift_quantised": "yes"}
    of_wide = "llama, heads of 64"
    rows = [
        *(("llama, " + t, FULL, llama, kv(t)) for t in plain_kv),
        ("llama, bf16", NO_SHIFT, llama, kv("bf16")),
        ("llama, f16 keys and bf16 values", FULL, llama, {"kv_type_k": "f16", "kv_type_v": "bf16"}),
        ("llama, f16, flash attention", FULL, llama, kv("f16") | {"flash_attention": "on"}),
        ("llama, f16, flash attention auto", FULL, llama, packed("f16", "f16", "auto")),
        ("llama, q8_0, flash attention", NO_SHIFT, llama, packed("q8_0", "q8_0")),
        (f"{of_wide}, q8_0, flash attention", FULL, wide, packed("q8_0", "q8_0")),
        (f"{of_wide}, q8_0, flash attention auto", FULL, wide, packed("q8_0", "q8_0", "auto")),
        *((f"{of_wide}, {t}, flash attention", NO_SHIFT, wide, packed(t, t)) for t in narrow),
        (f"{of_wide}, q4_0, shift_quantised", FULL, wide, packed("q4_0", "q4_0", **allowed)),
        (f"{of_wide}, q8_0 keys and f16 values", FULL, wide, packed("q8_0", "f16", "off")),
        (f"{of_wide}, f16 keys and q8_0 values, flash attention", FULL, wide, packed("f16", "q8_0")),
        (f"{of_wide}, q8_0 keys and q4_0 values, flash attention", FULL, wide, packed("q8_0", "q4_0")),
        (f"{of_wide}, q4_0 keys and f16 values", NO_SHIFT, wide, packed("q4_0", "f16", "off")),
        (f"{of_wide}, bf16 keys and q8_0 values, flash attention", NO_SHIFT, wide, packed("bf16", "q8_0")),
        ("qwen3, heads of 64, q8_0, flash attention", FULL, wide | {"arch": "qwen3"}, packed("q8_0", "q8_0")),
        ("llama, no cold budget", NO_COLD, llama, {"cold_budget_tokens": 0}),
        ("llama, several KV heads", FULL, {"n_embd": 128, "n_head": 4, "n_head_kv": 2}, {}),
        ("llama, q8_0 weights, f16", FULL, {"weights": "q8_0"}, kv("f16")),
        ("qwen2", FULL, {"arch": "qwen2"}, {}),
        ("qwen3", FULL, {"arch": "qwen3"}, {}),
        ("llama, YaRN", NO_SHIFT, yarn, {}),
        ("qwen2vl", NO_SHIFT, {"arch": "qwen2vl"}, {}),
        ("mamba", STATE_ONLY, {"arch": "mamba"}, {}),
        ("lfm2", STATE_ONLY, {"arch": "lfm2"}, {}),
        ("gemma3", WINDOWED, {"arch": "gemma3"}, {}),
        ("gemma3, swa_full", WHOLE_WINDOW, {"arch": "gemma3"}, swa),
        ("gpt-oss", WINDOWED, {"arch": "gpt-oss"}, {}),
        ("gpt-oss, swa_full", WHOLE_WINDOW, {"arch": "gpt-oss"}, swa),
        *((f"deepseek2, latent rows, {t}", FULL, latent | {"absorbed": True}, kv(t)) for t in plain_kv),
        ("deepseek2, latent rows, bf16", NO_SHIFT, latent | {"absorbed": True}, kv("bf16")),
        (
            "deepseek2, latent rows, q8_0, flash attention",
            NO_SHIFT,
            latent | {"absorbed": True},
            packed("q8_0", "q8_0"),
        ),
        ("deepseek2, rows of every head", FULL, latent | {"absorbed": False}, {}),
        (
            "deepseek2, rows of every head, q8_0, flash attention",
            NO_SHIFT,
            latent | {"absorbed": False},
            packed("q8_0", "q8_0"),
        ),
        *((f"llama, {t}, scores", SCORED, llama, scores | kv(t)) for t in plain_kv),
        ("llama, bf16, scores", SCORED_NO_SHIFT, llama, scores | kv("bf16")),
        ("llama, q8_0 weights, f16, scores", SCORED, {"weights": "q8_0"}, scores | kv("f16")),
        (f"{of_wide}, q8_0 keys and f16 values, scores", SCORED, wide, packed("q8_0", "f16", "off", scores="on")),
        ("qwen2, scores", SCORED, {"arch": "qwen2"}, scores),
        ("qwen3, scores", SCORED, {"arch": "qwen3"}, scores),
        ("llama, YaRN, scores", SCORED_NO_SHIFT, yarn, scores),
        ("qwen2vl, scores", SCORED_NO_SHIFT, {"arch": "qwen2vl"}, scores),
        ("deepseek2, latent rows, scores", SCORED, latent | {"absorbed": True}, scores),
        ("mamba, scores", STATE_ONLY, {"arch": "mamba"}, scores),
        ("lfm2, scores", STATE_ONLY, {"arch": "lfm2"}, scores),
        ("gemma3, scores", WINDOWED, {"arch": "gemma3"}, scores),
        ("gpt-oss, scores", WINDOWED, {"arch": "gpt-oss"}, scores),
    ]
    return [Row("llama", *row) for row in rows]


def _openvino() -> list[Row]:
    llama, yarn = {}, {"yarn": 4}
    scores, off = on(scores="on"), on(mirror="off")

    def asked(kv_type: str, **options: str) -> dict[str, Any]:
        return kv(kv_type) | on(kv="asked", **options)

    directories = [{"directory": a, "weights": w} for a, w in (("llama", "f16"), ("qwen2", "f16"), ("qwen3", "q8_0"))]
    waived, both = {"uncertified": True}, on(kv="asked")
    u8_keys = {"kv_type_k": "u8", "kv_type_v": "f32"} | both | waived
    u8_values = {"kv_type_k": "bf16", "kv_type_v": "u8"} | both | waived
    rows = [
        ("llama", FULL, llama, {}),
        ("llama, several KV heads", FULL, {"n_embd": 128, "n_head": 4, "n_head_kv": 2}, {}),
        ("qwen2", FULL, {"arch": "qwen2"}, {}),
        ("qwen3", FULL, {"arch": "qwen3"}, {}),
        *((f"llama, {t} as asked", FULL, llama, asked(t)) for t in ("f32", "f16", "bf16")),
        ("qwen2, bf16 as asked", FULL, {"arch": "qwen2"}, asked("bf16")),
        ("llama, u8 as asked, neither certified nor waived", NO_MIRROR, llama, asked("u8")),
        ("llama, u8 as asked", FULL, llama, asked("u8") | waived),
        ("llama, u8 keys and f32 values", FULL, llama, u8_keys),
        ("llama, bf16 keys and u8 values", FULL, llama, u8_values),
        ("llama, u8 as asked, bf16 inference", FULL, llama, asked("u8", inference="bf16") | waived),
        *((f"{ir['directory']}, {ir['weights']}, model directory", FULL, ir, {}) for ir in directories),
        ("llama, f16, model directory, scores", SCORED, directories[0], scores),
        ("llama, no cold budget", NO_COLD, llama, {"cold_budget_tokens": 0}),
        ("llama, YaRN", NO_SHIFT, yarn, {}),
        ("llama, mirror off", NO_MIRROR, llama, off),
        ("llama, mirror off, no cold budget", NO_MIRROR, llama, off | {"cold_budget_tokens": 0}),
        ("llama, mirror off, f16 as asked", NO_MIRROR, llama, asked("f16", mirror="off")),
        ("llama, YaRN, mirror off", NO_MIRROR, yarn, off),
        ("llama, scores", SCORED, llama, scores),
        ("qwen2, scores", SCORED, {"arch": "qwen2"}, scores),
        ("qwen3, scores", SCORED, {"arch": "qwen3"}, scores),
        *((f"llama, {t} as asked, scores", SCORED, llama, asked(t, scores="on")) for t in ("f16", "bf16")),
        ("llama, u8 as asked, scores", SCORED, llama, asked("u8", scores="on") | waived),
        ("llama, YaRN, scores", SCORED_NO_SHIFT, yarn, scores),
    ]
    return [Row("openvino", *row) for row in rows]


def _reference() -> list[Row]:
    llama, yarn, gemma3 = {}, {"yarn": 4}, {"arch": "gemma3"}
    scores, windowed = on(scores="on"), replace(FULL, sliding_window_attention_tokens=64)
    engines = ("no-cache", "markov-rs", "markov-rs-codec", "boundary-kv", "boundary-per-layer")
    rows = [
        ("llama", FULL, llama, {}),
        ("llama, several KV heads", FULL, {"n_embd": 128, "n_head": 4, "n_head_kv": 2}, {}),
        ("llama, float64", FULL, llama, on(dtype="float64")),
        ("llama, packed q8_0 weights", FULL, {"weights": "q8_0"}, on(weights="packed")),
        ("llama, no cold budget", NO_COLD, llama, {"cold_budget_tokens": 0}),
        ("qwen2", FULL, {"arch": "qwen2"}, {}),
        ("qwen3", FULL, {"arch": "qwen3"}, {}),
        ("llama, YaRN", FULL, yarn, {}),
        ("gemma3", windowed, gemma3, {}),
        ("llama, scores", SCORED, llama, scores),
        ("llama, YaRN, scores", SCORED, yarn, scores),
        ("gemma3, scores", replace(windowed, attention_scores=True), gemma3, scores),
        *((f"llama, engine {name}", NO_MIRROR, llama, on(engine=name)) for name in engines),
    ]
    return [Row("reference", *row) for row in rows]


ROWS: tuple[Row, ...] = (*_llama(), *_openvino(), *_reference())

REFUSED: tuple[Refused, ...] = (
    Refused("llama", "u8 rows", "u8: this backend opens bf16, f16, f32, iq4_nl, q4_0", config=kv("u8")),
    Refused("llama", "q8_0 values without flash attention", "ask for flash attention on or auto", config=kv("q8_0")),
    Refused(
        "llama",
        "q8_0 keys of heads of 16",
        "one of this model has 16",
        model={"head_dim": 16},
        config=packed("q8_0", "f16", "off"),
    ),
    Refused(
        "llama",
        "deepseek2, latent rows of two types",
        "one latent row for both",
        model={"arch": "latent", "absorbed": True},
        config=packed("f16", "f32", "off"),
    ),
    Refused("llama", "scores with flash attention", "flash", config=on(scores="on") | {"flash_attention": "on"}),
    *(
        Refused(
            "openvino", f"{t} rows as asked", f"cannot store keys or values as '{t}'", config=kv(t) | on(kv="asked")
        )
        for t in ("q8_0", "u4", "u3", "i8")
    ),
    Refused("openvino", "bf16 rows with f32 inference", "bf16", config=kv("bf16") | on(kv="asked", inference="f32")),
    Refused(
        "openvino",
        "f16 keys and f32 values",
        "in another type without saying so",
        config={"kv_type_k": "f16", "kv_type_v": "f32"} | on(kv="asked"),
    ),
    Refused("openvino", "u8 rows with mirror off", "needs mirror=on", config=kv("u8") | on(kv="asked", mirror="off")),
    Refused("openvino", "scores with mirror off", "scores=on needs mirror=on", config=on(scores="on", mirror="off")),
    *(
        Refused("openvino", arch, "is not proven on OpenVINO", model={"arch": arch})
        for arch in ("gemma3", "gpt-oss", "lfm2", "mamba", "qwen2vl")
    ),
    Refused("openvino", "deepseek2", "is not proven on OpenVINO", model={"arch": "latent", "absorbed": True}),
    *(
        Refused("reference", arch, f"architecture {arch}", model={"arch": arch})
        for arch in ("gpt-oss", "lfm2", "mamba")
    ),
    Refused("reference", "engine apollo", "carries no session", config=on(engine="apollo")),
    Refused("reference", "an engine with a window", "without an event", config=on(engine="standard:window=64")),
    Refused(
        "reference", "scores with another engine", "needs engine=standard", config=on(scores="on", engine="no-cache")
    ),
)

_folder = tempfile.TemporaryDirectory(prefix="kvtape-capabilities-")


@functools.cache
def _model(settings: tuple[tuple[str, Any], ...]) -> Path:
    model = dict(settings)
    if "directory" in model:
        return tiny_ir(model["directory"], model["weights"])
    path = Path(_folder.name) / ("-".join(f"{k}{v}" for k, v in settings) + "-tiny.gguf")
    if model.get("arch") == "latent":
        return write_tiny_latent(path, absorbed=model["absorbed"])
    return write_tiny(path, **model)


@functools.cache
def _engine(engine: str, settings: tuple[tuple[str, Any], ...]) -> Engine:
    return load_engine(engine, _model(settings))


def engine_of(row: Row | Refused) -> Engine:
    """The engine with the row's model, loaded once a process. Raises UsageError for a model that it does not take."""
    return _engine(row.engine, tuple(sorted(row.model.items())))


def config_of(row: Row | Refused, base: SessionConfig) -> SessionConfig:
    """`base` with what the row asks for."""
    return replace(base, **row.config)


def open_row(row: Row | Refused, n_ctx: int = 512) -> Backend:
    """A session of the row's configuration."""
    base = SessionConfig(
        n_ctx=n_ctx, chunk=16, kv_type_k="f32", kv_type_v="f32", threads=1, cold_budget_tokens=256, options={}
    )
    return engine_of(row).open(config_of(row, base))


def table() -> str:
    """The table of docs/backends.md."""
    heads = {
        "remove_tail": "tail",
        "remove_middle": "middle",
        "position_shift": "shift",
        "cold_store": "cold store",
        "recompute_range": "refill",
        "snapshot_state": "snapshot",
        "attention_scores": "scores",
        "sparse_attention": "sparse",
    }
    lines = [f"| configuration | {' | '.join(heads.values())} | window |", "|---|" + "---|" * (len(heads) + 1)]
    for engine in ("llama", "openvino", "reference"):
        lines.append(f"| **{engine}** |" + " |" * (len(heads) + 1))
        for row in (r for r in ROWS if r.engine == engine):
            marks = ["yes" if getattr(row.expected, flag) else "-" for flag in heads]
            window = row.expected.sliding_window_attention_tokens
            lines.append(f"| {row.of} | {' | '.join(marks)} | {window or '-'} |")
        lines += [f"| {r.of} | refused |" + " |" * len(heads) for r in REFUSED if r.engine == engine]
    return "\n".join(lines)
