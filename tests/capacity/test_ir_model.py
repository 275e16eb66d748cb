"""What is read of a model directory without OpenVINO: its shape, and a fingerprint that tells models apart."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from kvtape.capacity.fingerprint import FINGERPRINT_PARTS, fingerprint_difference, of_folder
from kvtape.capacity.ir_graph import read_ir_graph
from kvtape.capacity.model import ModelFileError, read_model
from support.openvino_ir import exported_ir, save_ir, tiny_ir, tiny_ir_source


def copied(folder: Path) -> Path:
    return Path(shutil.copytree(tiny_ir(), folder))


@pytest.mark.parametrize(("name", "weights"), [("llama-two-kv-heads", "q8_0"), ("qwen2", "f16")])
def test_sizes_are_those_of_the_gguf_that_it_was_made_from(name: str, weights: str) -> None:
    folder, gguf = read_model(tiny_ir(name, weights)), read_model(tiny_ir_source(name, weights))
    for part in ("n_layer", "n_embd", "n_head", "n_head_kv", "head_dim_k", "head_dim_v", "n_vocab", "n_ctx_train"):
        assert getattr(folder, part) == getattr(gguf, part), part
    assert folder.end_tokens == gguf.end_tokens
    assert folder.tokenizer == gguf.tokenizer == "gpt2"
    assert folder.rms_eps == pytest.approx(gguf.rms_eps)
    assert folder.geometry.groups == gguf.geometry.groups


def test_frequencies_are_those_that_the_graph_has() -> None:
    plain = 10000.0 ** (-np.arange(16) / 16)
    q8, f16 = (
        read_model(tiny_ir(n, w)).rope_frequencies for n, w in (("llama-two-kv-heads", "q8_0"), ("qwen2", "f16"))
    )
    np.testing.assert_allclose(q8, plain, rtol=1e-6)
    assert list(f16) == plain.astype(np.float16).astype(float).tolist()


def test_of_an_export_the_json_files_say_more() -> None:
    shape = read_model(exported_ir())
    assert (shape.arch, shape.n_ctx_train, shape.tokenizer) == ("qwen3", 4096, "none")
    assert (shape.n_layer, shape.n_head, shape.n_head_kv, shape.head_dim_k, shape.n_embd) == (2, 2, 1, 32, 64)


def test_end_tokens_come_from_all_files_that_name_some(tmp_path: Path) -> None:
    folder = copied(tmp_path / "ir")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 9, "text_config": {"max_position_embeddings": 64}}))
    assert read_model(folder).end_tokens == {2, 7, 8, 9}
    assert read_model(folder).n_ctx_train == 64


def test_texts_are_cut_only_for_a_tokenizer_that_takes_them_word_by_word(tmp_path: Path) -> None:
    for i, (old, new) in enumerate((("RegexSplit", "RegexNormalization"), ("BPETokenizer", "SentencepieceTokenizer"))):
        folder = copied(tmp_path / str(i))
        xml = (folder / "openvino_tokenizer.xml").read_text()
        (folder / "openvino_tokenizer.xml").write_text(xml.replace(f'type="{old}"', f'type="{new}"'))
        assert read_model(folder).tokenizer == "unknown"


def test_two_savings_of_one_model_have_one_fingerprint(tmp_path: Path) -> None:
    again = save_ir(tiny_ir_source(), tmp_path / "again", 4096)
    first, second = read_model(tiny_ir()).fingerprint, read_model(again).fingerprint
    assert first == second
    assert of_folder(first)
    assert len(first.split("/")) == len(FINGERPRINT_PARTS)
    assert not of_folder(read_model(tiny_ir_source()).fingerprint)


def parts_that_differ(folder: Path) -> list[str]:
    found = fingerprint_difference(read_model(tiny_ir()).fingerprint, read_model(folder).fingerprint)
    return [text.split(" (")[0] for text in found]


def test_other_weights_are_another_fingerprint(tmp_path: Path) -> None:
    folder = copied(tmp_path / "ir")
    table = max(
        read_ir_graph(folder / "openvino_model.xml").of_kind("Const"), key=lambda node: int(node.data.get("size", "0"))
    )
    weights = bytearray((folder / "openvino_model.bin").read_bytes())
    weights[int(table.data["offset"]) + int(table.data["size"]) // 2] ^= 1
    (folder / "openvino_model.bin").write_bytes(weights)
    assert parts_that_differ(folder) == ["weights"]


def test_another_attribute_in_the_graph_is_another_fingerprint(tmp_path: Path) -> None:
    folder = copied(tmp_path / "ir")
    xml = (folder / "openvino_model.xml").read_text()
    (folder / "openvino_model.xml").write_text(xml.replace('causal="false"', 'causal="true"', 1))
    assert parts_that_differ(folder) == ["header"]


def test_names_alone_make_no_other_model(tmp_path: Path) -> None:
    folder = copied(tmp_path / "ir")
    xml = (folder / "openvino_model.xml").read_text()
    (folder / "openvino_model.xml").write_text(re.sub(r'name="Multiply_(\d+)"', r'name="Times_\1"', xml))
    assert parts_that_differ(folder) == []


def test_another_tokenizer_is_another_fingerprint(tmp_path: Path) -> None:
    folder = copied(tmp_path / "ir")
    (folder / "openvino_tokenizer.xml").unlink()
    assert parts_that_differ(folder) == ["tokenizer"]


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("</net>", "", "damaged XML"),
        ('from-layer="0"', 'from-layer="99999"', "not the XML of an OpenVINO model"),
        ('type="Result"', 'type="Sink"', "0 results, but a decoder has one"),
        ('type="ReadValue"', 'type="ReadValue" id="x"', "damaged XML"),
        ("ScaledDotProductAttention", "PagedAttention", "no ScaledDotProductAttention"),
    ],
)
def test_damaged_graphs_are_named_with_what_to_do(old: str, new: str, why: str, tmp_path: Path) -> None:
    folder = copied(tmp_path / "ir")
    xml = (folder / "openvino_model.xml").read_text()
    assert old in xml
    (folder / "openvino_model.xml").write_text(xml.replace(old, new))
    with pytest.raises(ModelFileError, match=why):
        read_model(folder)


def test_constants_are_read_as_openvino_reads_them(tmp_path: Path) -> None:
    """Of every element type that weights come in."""
    values = np.arange(-8, 8, dtype=np.float32).reshape(4, 4)
    kinds = {
        "f32": values,
        "f16": values,
        "i8": values,
        "u8": values + 8,
        "i4": values,
        "u4": values + 8,
        "bf16": values,
    }
    x = op.parameter([4, 4], np.float32, "x")
    total = x
    for kind, numbers in kinds.items():
        packed = ov.Tensor(getattr(ov.Type, kind), ov.Shape([4, 4]))
        constant = op.constant(numbers, dtype=getattr(ov.Type, kind)) if kind not in ("u4", "i4") else None
        if constant is None:
            halves = (numbers.astype(np.int8) & 15).astype(np.uint8).reshape(-1, 2)
            packed.data[:] = (halves[:, 0] | halves[:, 1] << 4).reshape(packed.data.shape)
            constant = op.constant(packed)
        total = op.add(total, op.convert(constant, "f32"))
    file = tmp_path / "openvino_model.xml"
    ov.save_model(ov.Model([total], [x], "constants"), str(file), compress_to_fp16=False)
    graph = read_ir_graph(file)
    found = {n.data["element_type"]: graph.constant(n) for n in graph.of_kind("Const")}
    assert set(found) == set(kinds)
    for kind, numbers in kinds.items():
        np.testing.assert_array_equal(np.asarray(found[kind], np.float32), numbers, err_msg=kind)
