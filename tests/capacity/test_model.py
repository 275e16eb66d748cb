"""A model's shape and fingerprint, read from files written here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.fingerprint import fingerprint_difference
from kvtape.capacity.gguf_file import open_gguf
from kvtape.capacity.model import read_model
from support.tiny_gguf import write_tiny


def test_shape_of_a_tiny_llama(tmp_path: Path) -> None:
    model = read_model(write_tiny(tmp_path / "m.gguf", "llama", n_layer=3, n_embd=128, n_head=4, n_head_kv=2))
    assert (model.arch, model.n_layer, model.n_embd, model.n_head, model.n_head_kv) == ("llama", 3, 128, 4, 2)
    assert (model.head_dim_k, model.head_dim_v, model.rope_dims, model.rope_pairs) == (32, 32, 32, "interleaved")
    assert (model.n_vocab, model.n_ctx_train, model.sliding_window, model.qk_norm) == (320, 4096, 0, False)
    assert (model.tensor_types, model.tokenizer, model.end_tokens) == ({"F32"}, "gpt2", {2})


def test_odd_architectures(tmp_path: Path) -> None:
    assert read_model(write_tiny(tmp_path / "q.gguf", "qwen3")).qk_norm
    assert read_model(write_tiny(tmp_path / "q2.gguf", "qwen2")).rope_pairs == "halves"
    assert read_model(write_tiny(tmp_path / "y.gguf", "llama", yarn=4)).rope_scaling == "yarn"
    assert read_model(write_tiny(tmp_path / "g.gguf", "gemma3", window=8)).sliding_window == 8
    assert read_model(write_tiny(tmp_path / "w.gguf", "llama", weights="q8_0")).tensor_types == {"F32", "Q8_0"}


def test_28_layers_of_two_heads_of_128_weigh_28672_bytes_a_token(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", n_layer=28, n_embd=256, n_head=2, n_head_kv=2, head_dim=128)
    model = read_model(path)
    assert model.geometry.marginal_bytes() == 28_672
    assert model.geometry.stored_as("f32", "f32").marginal_bytes() == 57_344
    assert 0 < model.weights_bytes < path.stat().st_size


def test_fingerprint_knows_shapes_types_and_files_apart(tmp_path: Path) -> None:
    first = read_model(write_tiny(tmp_path / "a.gguf", "llama")).fingerprint
    assert read_model(write_tiny(tmp_path / "b.gguf", "llama")).fingerprint == first
    others = [
        read_model(write_tiny(tmp_path / "c.gguf", "llama", n_layer=1)),
        read_model(write_tiny(tmp_path / "d.gguf", "llama", weights="q8_0")),
        read_model(write_tiny(tmp_path / "e.gguf", "qwen2")),
        read_model(write_tiny(tmp_path / "f.gguf", "llama", seed=1)),
    ]
    assert len({first, *(m.fingerprint for m in others)}) == 5


def test_other_weights_under_the_same_header_differ_in_the_last_part_alone(tmp_path: Path) -> None:
    first, other = (read_model(write_tiny(tmp_path / f"{s}.gguf", "llama", seed=s)).fingerprint for s in (0, 1))
    assert [a == b for a, b in zip(first.split("/"), other.split("/"), strict=True)] == [True] * 5 + [False]
    assert [text.split(" (")[0] for text in fingerprint_difference(first, other)] == ["weights"]


def test_one_changed_tensor_is_seen(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    before = read_model(path).fingerprint
    tensor = open_gguf(path).tensors[-1]
    raw = bytearray(path.read_bytes())
    at = tensor.data_offset
    raw[at : at + tensor.n_bytes] = bytes(b ^ 1 for b in raw[at : at + tensor.n_bytes])
    (tmp_path / "changed.gguf").write_bytes(raw)
    assert fingerprint_difference(before, read_model(tmp_path / "changed.gguf").fingerprint)


def test_fingerprints_are_compared_by_what_both_have() -> None:
    assert fingerprint_difference("a/b/c/1/d", "a/b/c/1/d/e") == ()
    assert fingerprint_difference("a/b/c/1/x", "a/b/c/1/d/e") == ("header (x, given d)",)
    assert fingerprint_difference("toy/1", "toy/1") == ()
    assert fingerprint_difference("toy/1", "toy/2") == ("the form of the fingerprint",)
    assert fingerprint_difference("a/b/c/1/d/e", "a/b/c/1/d") == ("the form of the fingerprint",)


def test_a_rewritten_file_is_read_again(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama", n_layer=1)
    assert read_model(path).n_layer == 1
    path.unlink()
    assert read_model(write_tiny(path, "llama", n_layer=2)).n_layer == 2


@pytest.mark.parametrize("keep", [0, 3, 7, 20, 100, 2000, 4000])
def test_a_cut_header_is_refused_by_name(tmp_path: Path, keep: int) -> None:
    path = write_tiny(tmp_path / "cut.gguf", "llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match=r"cut\.gguf"):
        read_model(path)


@pytest.mark.parametrize("key", ["llama.embedding_length", "llama.rope.freq_base", "llama.attention.head_count"])
@pytest.mark.parametrize("value", ["much", b"\xff", [1, 2]])
def test_a_number_that_is_none_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    path = tmp_path / "wrong.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {"embedding_length": 64, "block_count": 2, "context_length": 8, "attention.head_count": 4}
    for name, number in numbers.items():
        if f"llama.{name}" != key:
            writer.add_uint32(f"llama.{name}", number)
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    if (key, value) == ("llama.attention.head_count", [1, 2]):
        assert read_model(path).n_head == 2
    else:
        with pytest.raises(ModelFileError, match=r"wrong\.gguf: "):
            read_model(path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="no such model file"):
        read_model(tmp_path / "none.gguf")
    (tmp_path / "text.gguf").write_text("plain text")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        read_model(tmp_path / "text.gguf")
