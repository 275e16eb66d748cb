"""Which files are taken, what is read of them, and how text is cut for the tokenizer."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtape.backends.errors import EnvironmentProblem, InputRejected, UsageError
from kvtape.backends.openvino import gates
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.graph_source import build_graph
from kvtape.backends.openvino.tokenizer import NativeTokenizer, pieces
from kvtape.capacity.model import ModelShape, read_model
from support.openvino_tiny import tiny_engine, tiny_path
from support.tiny_gguf import write_tiny


@pytest.mark.parametrize("keep", [0, 3, 7, 20, 100, 2000, 4000])
def test_a_cut_file_is_refused(tmp_path: Path, keep: int) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_path("llama").read_bytes()[:keep])
    with pytest.raises(UsageError, match="cut"):
        OpenVinoEngine.load(cut)


def test_a_file_cut_in_its_weights_is_refused(tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    whole = tiny_path("llama").read_bytes()
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UsageError, match=r"cut\.gguf"):
        OpenVinoEngine.load(cut).open(tiny_engine("llama").open(_config()).config)


def _config() -> object:
    from kvtape.backends.protocol import SessionConfig

    return SessionConfig(n_ctx=256)


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such model file"):
        OpenVinoEngine.load(tmp_path / "none.gguf")
    other = tmp_path / "other.gguf"
    other.write_text("plain text, long enough to be read")
    with pytest.raises(UsageError, match="not a GGUF"):
        OpenVinoEngine.load(other)


@pytest.mark.parametrize("arch", ["gemma3", "lfm2", "mamba", "qwen2vl"])
def test_unproven_architectures_are_refused(tmp_path: Path, arch: str) -> None:
    with pytest.raises(UsageError, match=f"architecture '{arch}' is not proven"):
        OpenVinoEngine.load(write_tiny(tmp_path / "m.gguf", arch))


def test_a_window_that_the_engines_see_differently_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="sliding window"):
        OpenVinoEngine.load(write_tiny(tmp_path / "m.gguf", "llama", window=8))


def with_types(*types: str) -> ModelShape:
    """A good model's shape, but for its tensor types."""
    return dataclasses.replace(read_model(tiny_path("llama")), tensor_types=frozenset(types))


@pytest.mark.parametrize("kind", ["IQ4_NL", "IQ4_XS", "Q2_K", "type 99"])
def test_inexact_tensor_types_are_refused(kind: str) -> None:
    with pytest.raises(UsageError, match=kind):
        gates.check_model(with_types("F32", kind))


def test_q4_k_needs_its_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_types("F32", "Q4_K")
    monkeypatch.setattr(gates, "_Q4_K_EXACT", False)
    with pytest.raises(EnvironmentProblem, match="OV_GGUF_Q4_K_ZP_F16=1 before the process starts"):
        gates.check_model(model)
    monkeypatch.setattr(gates, "_Q4_K_EXACT", True)
    gates.check_model(model)


@pytest.mark.parametrize("value", ["1", "0"])
def test_the_switch_is_read_when_the_process_starts(value: str) -> None:
    code = "import os; from kvtape.backends.openvino import gates; os.environ.clear(); print(gates._Q4_K_EXACT)"
    env = os.environ | {"OV_GGUF_Q4_K_ZP_F16": value}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == str(value == "1")


def test_importing_the_engine_loads_no_openvino_and_calms_numpy() -> None:
    code = (
        "import os, sys; os.environ.pop('OPENBLAS_NUM_THREADS', None); import kvtape.backends.openvino.engine; "
        "print('openvino' in sys.modules, os.environ['OPENBLAS_NUM_THREADS'])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "1"]


@pytest.mark.parametrize("queries", [False, True])
def test_shown_rows_leave_the_attention_fused(queries: bool) -> None:
    graph = build_graph(tiny_path("llama-two-kv-heads"), queries=queries)
    compiled = ov.Core().compile_model(graph.model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    kinds = [op.get_rt_info()["layerType"].astype(str) for op in compiled.get_runtime_model().get_ops()]
    assert kinds.count("ScaledDotProductAttention") == graph.shape.layers == 2
    assert "Softmax" not in kinds
    names = {name for port in compiled.outputs for name in port.get_names()}
    assert ("q_rows" in names) == queries
    assert {"logits", "k_rows", "v_rows"} <= names


words = st.text(st.sampled_from("ab Z'\n.é日 \t1"), max_size=40)


@given(st.lists(words, max_size=30).map("".join), st.integers(1, 700))
def test_pieces_join_to_the_text_and_are_cut_before_words_only(text: str, times: int) -> None:
    long = (text + "x y") * times
    parts = list(pieces(long))
    assert "".join(parts) == long
    for left, right in itertools.pairwise(parts):
        assert left[-1].isascii()
        assert left[-1].isalpha()
        assert right[0] == " "
        assert right[1].isalpha()
        assert right[1].isascii()
    longest_word = 3 + len(text.encode()) * 2
    assert all(len(p.encode()) <= 8000 + longest_word for p in parts)


def test_text_longer_than_the_tokenizers_limit_keeps_its_beginning() -> None:
    engine = tiny_engine("llama")
    text = "the cache holds keys " * 2000
    ids = engine.tokenize(text)
    assert len(ids) > 8192
    assert engine.detokenize(ids[:40]) == text[: len(engine.detokenize(ids[:40]))]
    assert "".join(engine.detokenize(ids[a : a + 4000]) for a in range(0, len(ids), 4000)) == text


def test_a_stretch_that_cannot_be_cut_is_refused() -> None:
    with pytest.raises(InputRejected, match="no safe place"):
        tiny_engine("llama").tokenize("1" * 9000)


def test_text_and_tokens_are_checked() -> None:
    engine = tiny_engine("llama")
    assert engine.tokenize("") == []
    assert engine.detokenize([]) == ""
    with pytest.raises(InputRejected, match="Unicode"):
        engine.tokenize("a\ud800b")
    with pytest.raises(InputRejected, match="vocabulary"):
        engine.detokenize([4, 320])
    text = "naïve 日本語 🎉\n\ttabs  and   spaces"
    assert engine.detokenize(engine.tokenize(text)) == text


@pytest.mark.parametrize("word", ["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
def test_a_control_token_in_plain_text_is_refused(word: str) -> None:
    """llama.cpp reads it as text; openvino-genai would put the token on the tape."""
    with pytest.raises(InputRejected, match=f"the text holds '{re.escape(word)}'"):
        tiny_engine("llama").tokenize(f"so he wrote {word} and went")


def test_a_vocabulary_without_a_tokenizer_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "bare.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("x.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(EnvironmentProblem, match="finds no tokenizer"):
        NativeTokenizer(path, "gpt2", 9).encode("text")
