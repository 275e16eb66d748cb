"""From metadata to layers: arrays, patterns, shared and latent layers, states, and what is flagged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvtape.capacity.allocation import CacheSettings
from kvtape.capacity.engines import Sizing, engine_rule
from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.geometry import LayerKind
from kvtape.capacity.layers import ModelKV, model_kv
from kvtape.capacity.metadata import Metadata, metadata_from_gguf, metadata_from_json
from support.known_models import keys_of
from support.tiny_gguf import write_tiny

MIB = 2**20


def model(arch: str, **keys: Any) -> ModelKV:
    """A model of 12 layers, 8 heads of 64, 2 KV heads unless `keys` (dots as __) say otherwise."""
    flat = {"block_count": 12, "attention__head_count": 8, "attention__head_count_kv": 2, "embedding_length": 512}
    flat = {**flat, **keys}
    named = {f"{arch}.{k.replace('__', '.')}": v for k, v in flat.items() if v is not None}
    return model_kv(Metadata({"general.architecture": arch, **named}, "test"))


def counts(kv: ModelKV) -> dict[str, int]:
    return {str(g.kind): sum(h.count for h in kv.geometry.groups if h.kind is g.kind) for g in kv.geometry.groups}


@pytest.mark.parametrize(
    ("arch", "keys", "windowed"),
    [
        ("gemma2", {}, 6),
        ("gemma3", {"attention__sliding_window": 512}, 10),
        ("gemma3", {}, 0),
        ("gemma3", {"attention__sliding_window": 512, "attention__sliding_window_pattern": 4}, 9),
        ("gemma3n", {"attention__sliding_window": 512, "block_count": 20}, 16),
        ("cohere2", {"attention__sliding_window": 4096}, 9),
        ("olmo2", {"attention__sliding_window": 4096}, 9),
        ("gpt-oss", {"attention__sliding_window": 128}, 6),
        ("smallthinker", {"attention__sliding_window": 4096}, 9),
        ("exaone4", {"attention__sliding_window": 4096}, 0),
        ("exaone4", {"attention__sliding_window": 4096, "block_count": 64}, 48),
        ("plamo3", {"attention__sliding_window": 2048}, 11),
        ("afmoe", {"attention__sliding_window": 2048}, 9),
        ("exaone-moe", {}, 9),
        ("lfm2", {"attention__sliding_window": 2048, "shortconv__l_cache": 3}, 12),
    ],
)
def test_periods(arch: str, keys: dict[str, Any], windowed: int) -> None:
    kv = model(arch, **keys)
    found = counts(kv)
    assert found.get("windowed", 0) == windowed
    assert found.get("global", 0) == int(keys.get("block_count", 12)) - windowed
    assert kv.notes == ()


def test_dense_first_and_last() -> None:
    """One layer too few: 5 of period 4 has its dense layers at 0 and 4, or at 3 alone."""
    assert counts(model("smallthinker", attention__sliding_window=4096, block_count=5))["global"] == 2
    assert counts(model("cohere2", attention__sliding_window=4096, block_count=5))["global"] == 1


def test_fixed_windows() -> None:
    kv = model("llama4", attention__sliding_window=4096)
    chunked = next(g for g in kv.geometry.groups if g.kind is LayerKind.CHUNKED)
    assert (chunked.count, chunked.window, chunked.part) == (9, 8192, "swa")
    assert counts(model("llama4", attention__sliding_window=0)) == {"global": 12}
    assert counts(model("llama4")) == {"chunked": 9, "global": 3}
    small = model("smallthinker", attention__sliding_window=128).geometry.groups
    assert [g.window for g in small if g.kind is LayerKind.WINDOWED] == [4096]


def test_an_array_that_the_engine_passes_over_is_noted() -> None:
    flags = [i % 2 == 0 for i in range(12)]
    kv = model("gemma3n", attention__sliding_window=512, attention__sliding_window_pattern=flags)
    assert counts(kv) == {"global": 2, "windowed": 10}
    assert "its period of 5 counts" in kv.notes[0]


def test_an_array_that_the_engine_reads() -> None:
    flags = [1, 1, 0] * 4
    keys = {"attention__sliding_window": 512, "attention__sliding_window_pattern": flags}
    for arch in ("gemma4", "mimo2", "step35", "cohere2moe"):
        assert counts(model(arch, **keys)) == {"global": 4, "windowed": 8}
    with pytest.raises(ModelFileError, match=r"gemma4\.attention\.sliding_window_pattern has 11 entries for 12 layers"):
        model("gemma4", attention__sliding_window=512, attention__sliding_window_pattern=flags[:-1])
    with pytest.raises(ModelFileError, match="needs an array"):
        model("gemma4", attention__sliding_window=512, attention__sliding_window_pattern=3)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "phi3"])
def test_windows_that_llama_cpp_passes_over(arch: str) -> None:
    kv = model(arch, attention__sliding_window=4096)
    assert counts(kv) == {"global": 12}
    assert "every layer is full" in kv.notes[0]


def test_an_unknown_architecture_is_never_silently_full() -> None:
    assert model("nova", attention__sliding_window=0).notes == ()
    full = model("nova", attention__sliding_window=512)
    assert counts(full) == {"global": 12}
    assert full.notes[0].startswith("assumed: nova is unknown and declares a window of 512")
    strided = model("nova", attention__sliding_window=512, attention__sliding_window_pattern=5)
    assert counts(strided) == {"global": 3, "windowed": 9}  # ceil(12 / 5)
    assert strided.notes[0].startswith("assumed:")
    flags = [True] * 11 + [False]
    listed = model("nova", attention__sliding_window=512, attention__sliding_window_pattern=flags)
    assert counts(listed) == {"global": 1, "windowed": 11}
    assert listed.notes[0].startswith("assumed:")


def test_lfm2_whose_first_head_count_is_0() -> None:
    heads = [0, 0, 8, 0, 0, 8, 0, 0, 8, 0, 8, 0, 8, 0, 8, 0]
    kv = model(
        "lfm2",
        block_count=16,
        attention__head_count=32,
        attention__head_count_kv=heads,
        embedding_length=2048,
        shortconv__l_cache=3,
    )
    parts = Sizing(kv.geometry, engine_rule("llama.cpp"), CacheSettings()).allocate(32768).parts
    assert [(p.part, p.layers) for p in parts] == [("full", 6), ("recurrent", 10)]
    assert parts[0].total_bytes / MIB == 384.0
    assert parts[1].total_bytes == 10 * 2048 * 2 * 4


def test_gpt_oss_and_gemma3n_at_their_contexts() -> None:
    """Two public calculators were 2 and 6.5 times off here."""
    oss = model_kv(Metadata(keys_of("gpt-oss-20b"), "oss"))
    parts = Sizing(oss.geometry, engine_rule("llama.cpp"), CacheSettings()).allocate(131072).parts
    assert [p.total_bytes / MIB for p in parts] == [3072.0, 18.0]
    e4b = model("gemma3n", block_count=35, attention__sliding_window=512, attention__shared_kv_layers=15)
    assert counts(e4b) == {"global": 4, "windowed": 16, "shared": 15}


def test_shared_layers_cost_nothing() -> None:
    flags = [True] * 5 + [False]
    kv = model(
        "gemma4",
        attention__sliding_window=512,
        attention__sliding_window_pattern=flags * 2,
        attention__shared_kv_layers=4,
        attention__key_length=128,
        attention__value_length=128,
        attention__key_length_swa=64,
        attention__value_length_swa=64,
    )
    assert counts(kv) == {"windowed": 7, "global": 1, "shared": 4}
    assert kv.geometry.bytes(100) == 100 * 2 * 2 * 2 * (7 * 64 + 128)


def test_prediction_layers_are_left_out() -> None:
    kv = model("glm4moe", block_count=13, nextn_predict_layers=1)
    assert counts(kv) == {"global": 12}
    with pytest.raises(ModelFileError, match="leaves no layer"):
        model("glm4moe", nextn_predict_layers=12)


def test_latent_and_expanded() -> None:
    keys = {"attention__kv_lora_rank": 512, "attention__key_length": 576, "attention__value_length": 512}
    absorbed = model(
        "deepseek2",
        attention__head_count_kv=1,
        attention__key_length_mla=192,
        attention__value_length_mla=128,
        **keys,
    )
    assert [(g.kind, g.k_elems, g.v_elems) for g in absorbed.geometry.groups] == [(LayerKind.LATENT, 576, 0)]
    expanded = model("deepseek2", attention__head_count_kv=8, **keys)
    assert counts(expanded) == {"global": 12}
    assert "no absorbed keys" in expanded.notes[0]


@pytest.mark.parametrize(
    ("arch", "keys", "r", "s"),
    [
        ("mamba", {"ssm__conv_kernel": 4, "ssm__inner_size": 1024, "ssm__state_size": 16}, 3 * 1024, 16 * 1024),
        (
            "mamba2",
            {"ssm__conv_kernel": 4, "ssm__inner_size": 1024, "ssm__state_size": 128, "ssm__group_count": 2},
            3 * (1024 + 512),
            128 * 1024,
        ),
        ("rwkv7", {"wkv__head_size": 64, "token_shift_count": 2}, 2 * 512, 512 * 64),
        ("rwkv6", {"wkv__head_size": 32}, 2 * 512, 512 * 32),
    ],
)
def test_states_of_recurrent_models(arch: str, keys: dict[str, Any], r: int, s: int) -> None:
    kv = model(arch, attention__head_count=None, attention__head_count_kv=None, **keys)
    assert [(g.kind, g.count, g.k_elems, g.v_elems, g.type_k) for g in kv.geometry.groups] == [
        (LayerKind.RECURRENT, 12, r, s, "f32")
    ]
    assert kv.geometry.marginal_bytes() == 0
    assert kv.geometry.bytes(1) == kv.geometry.bytes(10**6) == kv.geometry.stored_as("q8_0", "q8_0").bytes(5)


_STATE = {"ssm__conv_kernel": 4, "ssm__inner_size": 1024, "ssm__state_size": 16, "ssm__group_count": 1}


@pytest.mark.parametrize(
    ("arch", "keys", "attention", "recurrent"),
    [
        ("qwen3next", {}, 3, 9),
        ("qwen35", {"full_attention_interval": 6}, 2, 10),
        ("qwen35", {"attention__recurrent_layers": [True] * 11 + [False]}, 1, 11),
        ("jamba", {"attention__head_count_kv": [0, 0, 0, 2] * 3}, 3, 9),
        ("granitehybrid", {"attention__head_count_kv": [0] * 11 + [4]}, 1, 11),
        ("falcon-h1", {}, 12, 12),
        ("nemotron_h", {"attention__head_count_kv": [0, 2, 0] * 4, "feed_forward_length": [0, 0, 9] * 4}, 4, 4),
    ],
)
def test_hybrid_layers(arch: str, keys: dict[str, Any], attention: int, recurrent: int) -> None:
    kv = model(arch, **_STATE, **keys)
    assert counts(kv) == {"global": attention, "recurrent": recurrent}
    assert kv.notes == ()


def test_delta_attention_of_kimi() -> None:
    """Three convolutions of every head, and a square for each; with the kernel in the file or without."""
    for kernel, past in ((4, 3), (3, 2), (None, 3)):
        kv = model("kimi-linear", attention__head_count_kv=[0, 0, 2] * 4, kda__head_dim=64, ssm__conv_kernel=kernel)
        (state,) = (g for g in kv.geometry.groups if g.kind is LayerKind.RECURRENT)
        assert (state.count, state.k_elems, state.v_elems) == (8, 3 * past * 8 * 64, 8 * 64 * 64)


def test_an_unknown_hybrid_is_flagged() -> None:
    for keys in ({"full_attention_interval": 3}, {"attention__head_count_kv": [0, 0, 2] * 4}):
        kv = model("nova", **_STATE, **keys)
        assert counts(kv) == {"global": 4, "recurrent": 8}
        assert kv.notes[0].startswith("assumed: nova is unknown")


def test_the_indexer_of_sparse_attention() -> None:
    kv = model_kv(Metadata(keys_of("GLM-5 class, DSA"), "glm"))
    assert kv.geometry.parts() == ("latent", "indexer")
    every = model_kv(Metadata(keys_of("GLM-5 class, DSA", **{"attention.indexer.types": None}), "glm"))
    assert [g.count for g in every.geometry.groups] == [78, 78]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"block_count": None}, r"nova\.block_count is missing"),
        ({"attention__head_count": None}, r"nova\.attention\.head_count is missing"),
        ({"attention__head_count_kv": [1, 2]}, "has 2 entries for 12 layers"),
        ({"attention__key_length": "64"}, "is '64'; a whole number"),
        ({"attention__key_length": 64.5}, "is 64.5"),
        ({"attention__head_count_kv": -1}, "is -1"),
        ({"embedding_length": None}, r"nova\.embedding_length is missing"),
        ({"embedding_length": None, "attention__key_length": 64}, r"nova\.embedding_length is missing"),
        ({"block_count": True}, "is True; a whole number"),
        ({"block_count": 1e300}, "a whole number"),
        ({"block_count": 2**40}, "the most is 10000"),
        ({"attention__key_length": 2**63}, "a whole number"),
        ({"attention__shared_kv_layers": 12}, "is 12, which leaves no KV of the 12 layers"),
        ({"attention__shared_kv_layers": 13}, "leaves no KV"),
    ],
)
def test_bad_metadata_names_the_key(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        model("nova", **keys)


def test_json_and_file_say_the_same(tmp_path: Path) -> None:
    """A flat map of the file's own keys, dumped as JSON, gives the same model."""
    meta, weights = metadata_from_gguf(write_tiny(tmp_path / "m.gguf", "lfm2"))
    path = tmp_path / "m.json"
    path.write_text(json.dumps(dict(meta.values)))
    from_json = metadata_from_json(path)
    assert model_kv(from_json) == model_kv(meta)
    assert model_kv(meta, weights).weights_bytes == weights > 10**5


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": {"b": 1}}', '{"a": [[1]]}', "7", "[" * 100_000, '{"a": ' + "9" * 5000 + "}"]
)
def test_json_that_is_no_flat_map(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ModelFileError, match=r"bad\.json: not"):
        metadata_from_json(path)


def test_missing_things(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such metadata file"):
        metadata_from_json(tmp_path / "none.json")
    with pytest.raises(ModelFileError, match=r"general\.architecture is missing"):
        model_kv(Metadata({}, "empty"))
