"""Model directories: the session's graph computes what the directory's own graph does, and is refused where it would
not."""

from __future__ import annotations

import functools
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as op

from kvtape.backends.errors import EngineFault, EnvironmentProblem, InputRejected, UsageError
from kvtape.backends.openvino.engine import OpenVinoEngine
from kvtape.backends.openvino.graph_source import build_graph
from kvtape.backends.openvino.rope import Rotation
from kvtape.backends.protocol import SessionConfig
from kvtape.backends.registry import check_fits, open_engine
from support.edited_ir import (
    attention_of,
    edited_ir,
    with_plain_attention,
    with_shared_cache,
    with_tokens_first,
    with_window,
    without_beam,
)
from support.openvino_ir import exported_ir, tiny_ir, tiny_ir_engine, tiny_ir_source
from support.openvino_tiny import assert_whole, same_rows, tokens

EXACT = {
    "INFERENCE_PRECISION_HINT": "f32",
    "EXECUTION_MODE_HINT": "ACCURACY",
    "KEY_CACHE_PRECISION": "f32",
    "VALUE_CACHE_PRECISION": "f32",
}
KINDS = [("llama", "f16"), ("llama-two-kv-heads", "q8_0"), ("qwen2", "q8_0"), ("qwen3", "f16")]
CONFIG = SessionConfig(n_ctx=512, chunk=16, cold_budget_tokens=256)


@functools.cache
def own_request(name: str, weights: str) -> Any:
    """The directory's own graph, compiled as it is."""
    return ov.Core().compile_model(str(tiny_ir(name, weights) / "openvino_model.xml"), "CPU", EXACT)


def own_logits(name: str, weights: str, ids: list[int]) -> Any:
    return logits_of(own_request(name, weights), ids)


def logits_of(model: Any, ids: list[int]) -> Any:
    """Of every token, by the inputs that the directory has."""
    request, n = model.create_infer_request(), len(ids)
    feed = {
        "input_ids": np.array([ids]),
        "attention_mask": np.ones((1, n), np.int64),
        "position_ids": np.arange(n)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    return np.array(request.infer(feed)["logits"][0])


@pytest.mark.parametrize(("name", "weights"), KINDS)
def test_a_session_computes_what_the_directorys_own_graph_computes(name: str, weights: str) -> None:
    ids = tokens(50, seed=3)
    want = own_logits(name, weights, ids)
    session = tiny_ir_engine(name, weights).open(CONFIG)
    np.testing.assert_allclose(session.prefill(ids[:40], 0).logits, want[39], atol=1e-5)
    for at in range(40, 50):
        np.testing.assert_allclose(session.prefill([ids[at]], at).logits, want[at], atol=1e-5)
    assert_whole(session)


@pytest.mark.parametrize(("name", "weights"), KINDS)
def test_a_directory_computes_what_its_gguf_computes(name: str, weights: str) -> None:
    """Of Q8_0 to rounding. genai saves the angles of an F16 file in f16: the same model near position 0 only."""
    ids = tokens(60, seed=4)
    folder = tiny_ir_engine(name, weights).open(CONFIG).prefill(ids, 0).logits
    gguf = OpenVinoEngine.load(tiny_ir_source(name, weights)).open(CONFIG).prefill(ids, 0).logits
    apart = np.abs(folder - gguf).max()
    assert apart < (1e-5 if weights == "q8_0" else 1e-2)
    assert (apart > 1e-5) == (weights == "f16")


@pytest.mark.parametrize(
    ("name", "weights", "queries"), [("llama-two-kv-heads", "q8_0", False), ("qwen3", "f16", True)]
)
def test_attention_stays_fused_with_its_cache(name: str, weights: str, queries: bool) -> None:
    graph = build_graph(tiny_ir(name, weights), queries=queries, n_ctx_train=4096)
    compiled = ov.Core().compile_model(graph.model, "CPU", EXACT)
    kinds = Counter(n.get_rt_info()["layerType"].astype(str) for n in compiled.get_runtime_model().get_ops())
    assert kinds["ScaledDotProductAttention"] == graph.shape.layers == 2
    assert kinds["MemoryInput"] == kinds["MemoryOutput"] == 4
    assert "Softmax" not in kinds
    assert ("q_rows" in {n for port in compiled.outputs for n in port.get_names()}) == queries


def test_a_directory_that_optimum_intel_exported_is_taken_as_it_is() -> None:
    ids = tokens(40, seed=8)
    engine = OpenVinoEngine.load(exported_ir())
    session = engine.open(CONFIG)
    assert session.capabilities == tiny_ir_engine().open(CONFIG).capabilities
    got = session.prefill(ids, 0).logits
    own = ov.Core().compile_model(str(exported_ir() / "openvino_model.xml"), "CPU", EXACT)
    np.testing.assert_allclose(got, logits_of(own, ids)[-1], atol=1e-4)
    session.evict(8, 24)
    assert_whole(session)
    assert (engine.facts.arch, engine.facts.n_ctx_train, engine.facts.end_tokens) == ("qwen3", 4096, frozenset())
    with pytest.raises(EnvironmentProblem, match="pass token ids"):
        engine.detokenize(ids)


def test_only_the_chosen_rows_go_through_the_heads_matrix() -> None:
    graph = build_graph(tiny_ir(), n_ctx_train=4096)
    head = graph.model.outputs[0].get_node().input_value(0)
    while head.get_node().get_type_name() != "MatMul":
        head = head.get_node().input_value(0)
    assert head.get_node().input_value(0).get_node().get_type_name() == "Gather"


def test_where_the_heads_matrix_is_not_found_all_rows_go_through_it(tmp_path: Path) -> None:
    def edit(model: Any) -> None:
        result = model.get_results()[0]
        logits = result.input_value(0)
        both = op.maximum(logits, op.add(logits, op.constant(np.float32(-1))))
        result.input(0).replace_source_output(both.output(0))
        both.output(0).get_tensor().set_names({"logits"})

    session = OpenVinoEngine.load(edited_ir(tiny_ir(), tmp_path / "ir", edit)).open(CONFIG)
    ids = tokens(20)
    np.testing.assert_allclose(session.prefill(ids, 0).logits, own_logits("llama", "f16", ids)[-1], atol=1e-5)


def test_the_rotation_is_the_one_written_in_the_graph() -> None:
    engine = tiny_ir_engine("llama", "f16")
    engine.open(CONFIG)
    (compiled,) = engine._compiled.values()
    assert isinstance(compiled.rotation, Rotation)
    for layer in compiled.rotation.layers:
        assert layer.pairs == "halves"
        assert layer.frequencies[1] == 0.5625  # 0.5623 in f16


def test_rows_cut_moved_and_put_back_are_those_of_a_session_that_never_lost_them() -> None:
    ids = tokens(64, seed=5)
    plain, session = (tiny_ir_engine("qwen2", "q8_0").open(CONFIG) for _ in range(2))
    plain.prefill(ids, 0)
    session.prefill(ids, 0)
    block = session.export_block(16, 32)
    session.evict(16, 32)
    session.shift(32, 64, -16)
    session.shift(16, 48, 16)
    session.admit(block, 16, 16)
    assert same_rows(plain, session)
    saved = session.snapshot()
    session.truncate(8)
    session.restore(saved)
    assert_whole(session)
    np.testing.assert_array_equal(session.prefill([7], 64).logits, plain.prefill([7], 64).logits)


def test_scores_of_a_directory_are_those_of_its_gguf() -> None:
    config = SessionConfig(n_ctx=512, chunk=16, options={"scores": "on"})
    ids = tokens(40, seed=6)
    got = []
    for engine in (tiny_ir_engine("qwen3", "q8_0"), OpenVinoEngine.load(tiny_ir_source("qwen3", "q8_0"))):
        session = engine.open(config)
        session.prefill(ids, 0)
        got.append(session.take_mass())
    np.testing.assert_allclose(got[0].mass, got[1].mass, atol=1e-4)


def test_a_failed_call_costs_the_session_and_carries_its_siblings() -> None:
    engine = OpenVinoEngine.load(tiny_ir("llama-two-kv-heads", "q8_0"))
    one, other = engine.open(CONFIG), engine.open(CONFIG)
    ids = tokens(20)
    one.prefill(ids, 0)
    other.prefill(ids, 0)
    one.abort_next()
    with pytest.raises(EngineFault):
        one.prefill([5], 20)
    want = own_logits("llama-two-kv-heads", "q8_0", [*ids, 5])
    np.testing.assert_allclose(other.prefill([5], 20).logits, want[-1], atol=1e-5)


def test_texts_go_through_the_directorys_tokenizer() -> None:
    engine = tiny_ir_engine()
    gguf = OpenVinoEngine.load(tiny_ir_source())
    text = "the cache holds the keys é 日 " * 400
    assert engine.tokenize(text) == gguf.tokenize(text)
    assert len(engine.tokenize(text)) > 1000
    assert engine.detokenize(engine.tokenize(text)) == text
    assert engine.facts.end_tokens == gguf.facts.end_tokens == {2}
    with pytest.raises(InputRejected, match="control token"):
        engine.tokenize("so <|im_end|> it goes")


def test_a_text_longer_than_the_tokenizers_limit_keeps_its_beginning() -> None:
    engine = tiny_ir_engine()
    text = "the cache holds keys " * 2000
    ids = engine.tokenize(text)
    assert len(ids) > 8192
    assert engine.detokenize(ids[:40]) == text[: len(engine.detokenize(ids[:40]))]


def copied(folder: Path, *, without: str = "nothing") -> Path:
    shutil.copytree(tiny_ir(), folder, ignore=lambda _, names: [n for n in names if n.startswith(without)])
    return folder


def test_without_a_tokenizer_it_serves_token_ids(tmp_path: Path) -> None:
    engine = OpenVinoEngine.load(copied(tmp_path / "ir", without="openvino_tok"))
    ids = tokens(20)
    np.testing.assert_allclose(
        engine.open(CONFIG).prefill(ids, 0).logits, own_logits("llama", "f16", ids)[-1], atol=1e-5
    )
    with pytest.raises(EnvironmentProblem, match="pass token ids"):
        engine.tokenize("the cache")


def no_change(model: Any) -> None:
    pass


def with_a_state_more(model: Any) -> None:
    info = ov.op.util.VariableInfo()
    info.variable_id, info.data_type = "past_key_values.2.key", ov.Type.f32
    info.data_shape = ov.PartialShape([-1, 1, -1, 32])
    variable = ov.op.util.Variable(info)
    read = ov.op.read_value(op.constant(np.zeros((1, 1, 1, 32), np.float32)), variable)
    model.add_variables([variable])
    model.add_sinks([ov.op.assign(op.add(read, op.constant(np.float32(1))), variable)])


def with_another_scale(model: Any) -> None:
    for node in attention_of(model):
        new = op.scaled_dot_product_attention(*node.input_values()[:4], op.constant(np.float32(0.5)))
        for target in list(node.output(0).get_target_inputs()):
            target.replace_source_output(new.output(0))


def with_another_input(model: Any) -> None:
    extra = op.parameter([-1, -1], np.int64, "token_type_ids")
    extra.output(0).get_tensor().set_names({"token_type_ids"})
    ids = next(p for p in model.get_parameters() if "input_ids" in p.output(0).get_names())
    moved = op.add(ids, extra)
    for target in list(ids.output(0).get_target_inputs()):
        if target.get_node() is not moved and target.get_node().get_friendly_name() != moved.get_friendly_name():
            target.replace_source_output(moved.output(0))
    model.add_parameters([extra])


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (with_window(64), "not causal over all of 4096 rows"),
        (with_window(3), "not causal over all of 5 rows"),
        (with_plain_attention, "no ScaledDotProductAttention; export it anew"),
        (without_beam, "no input beam_idx"),
        (with_another_scale, "not by 1/sqrt"),
        (with_another_input, "token_type_ids"),
        (with_shared_cache, "share a cache"),
        (with_a_state_more, "2 attention nodes over 3 layers"),
    ],
    ids=[
        "window",
        "narrow-window",
        "plain-attention",
        "no-beam",
        "scale",
        "more-inputs",
        "shared-cache",
        "more-states",
    ],
)
def test_what_a_session_cannot_keep_is_refused_before_anything_is_opened(
    edit: Callable[[Any], None], why: str, tmp_path: Path
) -> None:
    folder = edited_ir(tiny_ir(), tmp_path / "ir", edit)
    with pytest.raises(UsageError, match=why):
        check_fits("openvino", folder, CONFIG)
    with pytest.raises(UsageError, match=why):
        OpenVinoEngine.load(folder).open(CONFIG)


def test_an_edited_graph_that_is_the_same_model_is_taken(tmp_path: Path) -> None:
    """The refusals above are of what they name, not of graphs that went through an edit."""
    folder = edited_ir(tiny_ir(), tmp_path / "ir", no_change)
    ids = tokens(20)
    want = own_logits("llama", "f16", ids)[-1]
    np.testing.assert_allclose(OpenVinoEngine.load(folder).open(CONFIG).prefill(ids, 0).logits, want, atol=1e-5)


def test_caches_with_tokens_before_heads_are_taken(tmp_path: Path) -> None:
    folder = edited_ir(tiny_ir("llama-two-kv-heads", "q8_0"), tmp_path / "ir", with_tokens_first)
    ids = tokens(30)
    want = own_logits("llama-two-kv-heads", "q8_0", ids)
    session = OpenVinoEngine.load(folder).open(CONFIG)
    np.testing.assert_allclose(session.prefill(ids[:20], 0).logits, want[19], atol=1e-5)
    np.testing.assert_allclose(session.prefill(ids[20:], 20).logits, want[29], atol=1e-5)
    assert_whole(session)


def test_a_window_wider_than_the_trained_context_hides_nothing(tmp_path: Path) -> None:
    folder = edited_ir(tiny_ir(), tmp_path / "ir", with_window(4096))
    assert check_fits("openvino", folder, CONFIG) == 512


def test_damaged_folders_are_refused_with_what_to_do(tmp_path: Path) -> None:
    weights = "openvino_model.bin"
    missing = copied(tmp_path / "missing", without=weights)
    with pytest.raises(UsageError, match=r"openvino_model\.bin: the weights are missing; copy the whole folder"):
        OpenVinoEngine.load(missing)
    cut = copied(tmp_path / "cut")
    (cut / weights).write_bytes((tiny_ir() / weights).read_bytes()[:-5000])
    with pytest.raises(UsageError, match=r"is cut or of another model, copy the folder again"):
        OpenVinoEngine.load(cut)
    mixed = copied(tmp_path / "mixed")
    shutil.copy(tiny_ir("llama-two-kv-heads", "f16") / "openvino_model.xml", mixed)
    with pytest.raises(UsageError, match="of another model"):
        OpenVinoEngine.load(mixed)
    torn = copied(tmp_path / "torn")
    (torn / "openvino_model.xml").write_bytes((tiny_ir() / "openvino_model.xml").read_bytes()[:9000])
    with pytest.raises(UsageError, match="damaged XML"):
        OpenVinoEngine.load(torn)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no openvino_model\.xml in this folder"):
        OpenVinoEngine.load(tmp_path / "empty")


def test_the_trained_context_comes_from_the_folder_or_from_the_user(tmp_path: Path) -> None:
    folder = copied(tmp_path / "ir", without="config.json")
    with pytest.raises(UsageError, match=r"max_position_embeddings\) there, or say it .* openvino:trained=N"):
        OpenVinoEngine.load(folder)
    assert OpenVinoEngine.load(folder, {"trained": "1024"}).facts.n_ctx_train == 1024
    for wrong in ("0", "-1", "many"):
        with pytest.raises(UsageError, match="a whole number of tokens"):
            OpenVinoEngine.load(folder, {"trained": wrong})
    with pytest.raises(UsageError, match="trained=1024, but the model says 4096"):
        OpenVinoEngine.load(tiny_ir(), {"trained": "1024"})


def test_a_folder_given_to_llama_cpp_is_refused_with_the_remedy() -> None:
    with pytest.raises(UsageError, match="llama does not read the folder of an OpenVINO model; give --model the GGUF"):
        open_engine("llama", tiny_ir())
