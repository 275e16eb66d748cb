"""Model folders of OpenVINO: states read from the XML alone, and what is not a cache."""

from __future__ import annotations

import json
from pathlib import Path

import openvino as ov
import pytest

from kvtape.backends.openvino.graph_source import build_graph
from kvtape.capacity.allocation import CacheSettings
from kvtape.capacity.engines import Sizing, engine_rule
from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.geometry import LayerKind
from kvtape.capacity.layers import model_kv
from kvtape.capacity.metadata import metadata_from_gguf
from kvtape.capacity.openvino_ir import openvino_model_kv
from kvtape.capacity.source import read_model_kv
from support.tiny_gguf import write_tiny


def folder_with(tmp_path: Path, states: list[tuple[str, str]], config: object = None) -> Path:
    data = "".join(
        f'<layer id="{i}" name="r{i}" type="ReadValue" version="opset6"><data variable_id="{name}" variable_type="f32" '
        f'variable_shape="{shape}"/></layer><layer id="9{i}" type="Assign"><data variable_id="{name}"/></layer>'
        for i, (name, shape) in enumerate(states)
    )
    (tmp_path / "openvino_model.xml").write_text(f'<?xml version="1.0"?><net><layers>{data}</layers></net>')
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_real_graph_says_what_its_gguf_says(tmp_path: Path) -> None:
    gguf = write_tiny(tmp_path / "m.gguf", "llama", n_layer=3, n_embd=128, n_head=4, n_head_kv=2)
    ov.save_model(build_graph(gguf, queries=False).model, tmp_path / "openvino_model.xml")
    found = read_model_kv(tmp_path)
    assert found.geometry == model_kv(metadata_from_gguf(gguf)[0]).geometry
    assert found.weights_bytes == (tmp_path / "openvino_model.bin").stat().st_size
    groups = found.geometry.groups
    assert [(g.kind, g.count, g.k_elems, g.v_elems, g.heads) for g in groups] == [(LayerKind.GLOBAL, 3, 64, 64, 2)]


def test_names_and_layouts_of_exported_models(tmp_path: Path) -> None:
    roles = [(layer, role) for layer in range(2) for role in ("key", "value")]
    states = [(f"past_key_values.{layer}.{role}present.{layer}.{role}", "?,8,?,128") for layer, role in roles]
    config = {"model_type": "qwen3", "max_position_embeddings": 40960, "sliding_window": 4096}
    found = openvino_model_kv(folder_with(tmp_path, states, config))
    assert (found.arch, found.model_max, found.weights_bytes) == ("qwen3", 40960, 0)
    assert [(g.count, g.k_elems, g.v_elems, g.heads) for g in found.geometry.groups] == [(2, 1024, 1024, 8)]
    assert "frees none" in found.notes[0]


def test_layers_that_differ_and_recurrent_states(tmp_path: Path) -> None:
    states = [
        ("cache_params.past.conv.0cache_params.present.conv.0", "?,512,4"),
        ("cache_params.past.ssm.0cache_params.present.ssm.0", "?,16,64,32"),
        ("past_key_values.1.key", "1,2,?,64"),
        ("past_key_values.1.value", "1,2,?,64"),
        ("past_key_values.2.key", "-1,1,-1,96"),
        ("past_key_values.2.value", "-1,1,-1,64"),
    ]
    found = openvino_model_kv(folder_with(tmp_path, states, {"text_config": {"max_position_embeddings": 128}}))
    assert found.model_max == 128
    assert sorted((str(g.kind), g.count, g.k_elems, g.v_elems) for g in found.geometry.groups) == [
        ("global", 1, 96, 64),
        ("global", 1, 128, 128),
        ("recurrent", 1, 512 * 4, 16 * 64 * 32),
    ]
    sized = Sizing(found.geometry.stored_as("u8", "u8"), engine_rule("openvino"), CacheSettings()).allocate(10)
    recurrent = next(p for p in sized.parts if p.part == "recurrent")
    assert recurrent.total_bytes == 4 * (512 * 4 + 16 * 64 * 32)


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ([], "has no states"),
        ([("beam_0", "?")], "neither keys nor values"),
        ([("cache_k_l0", "?")], "which no cache has"),
        ([("cache_k_l0", "?,1,?,8"), ("past.0.key", "?,1,?,8")], "two states of keys"),
    ],
)
def test_states_that_are_no_cache(tmp_path: Path, states: list[tuple[str, str]], message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        openvino_model_kv(folder_with(tmp_path, states))


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"no openvino_model\.xml in this folder"):
        read_model_kv(tmp_path)
    (tmp_path / "openvino_model.xml").write_text("<net><layers>")
    with pytest.raises(ModelFileError, match="damaged XML"):
        read_model_kv(tmp_path)
    (folder_with(tmp_path, [("cache_k_l0", "?,1,?,8")]) / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match=r"config\.json: not JSON"):
        read_model_kv(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([1], "not a map of settings"),
        ({"max_position_embeddings": "abc"}, "max_position_embeddings is 'abc'; a whole number"),
        ({"max_position_embeddings": -5}, "is -5"),
        ({"max_position_embeddings": 2**70}, "a whole number"),
    ],
)
def test_a_config_that_says_nonsense(tmp_path: Path, config: object, message: str) -> None:
    with pytest.raises(ModelFileError, match=rf"config\.json: .*{message}"):
        openvino_model_kv(folder_with(tmp_path, [("cache_k_l0", "?,1,?,8")], config))
