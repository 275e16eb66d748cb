"""Weights of a model directory, by what its graph does: those of the GGUF that it was made from, and its logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openvino import opset13 as op

from kvtape.backends.protocol import SessionConfig
from kvtape.backends.reference.errors import ModelUnsupported
from kvtape.backends.reference.model.weights import Weights
from kvtape.backends.reference.session.engine import ReferenceEngine
from support.edited_ir import edited_ir, with_plain_attention
from support.openvino_ir import exported_ir, tiny_ir, tiny_ir_engine, tiny_ir_source
from support.openvino_tiny import tokens

KINDS = [("llama-two-kv-heads", "q8_0"), ("qwen2", "q8_0"), ("qwen3", "f16")]
CONFIG = SessionConfig(n_ctx=512, chunk=16)


def matrices(weights: Weights) -> dict[str, Any]:
    """All but queries and keys of llama, whose components genai puts in another order."""
    found = {"embedding": weights.embedding, "head": weights.head.matrix}
    for i, layer in enumerate(weights.layers):
        parts = {"v": layer.v, "out": layer.attn_out}
        for name, part in {**parts, "gate": layer.feed.gate, "up": layer.feed.up, "down": layer.feed.down}.items():
            found[f"{i}.{name}"] = part.matrix
    return found


@pytest.mark.parametrize(("name", "weights"), KINDS)
def test_every_matrix_is_the_one_of_the_gguf(name: str, weights: str) -> None:
    folder, gguf = (matrices(Weights(p)) for p in (tiny_ir(name, weights), tiny_ir_source(name, weights)))
    for key, matrix in folder.items():
        assert matrix.storage == weights.upper()
        np.testing.assert_array_equal(matrix.rows(slice(None)), gguf[key].rows(slice(None)))


@pytest.mark.parametrize("weights", ["f16", "q8_0"])
def test_queries_and_keys_are_those_of_the_gguf_in_another_order(weights: str) -> None:
    folder, gguf = (Weights(path("llama-two-kv-heads", weights)) for path in (tiny_ir, tiny_ir_source))
    for got, want in zip(folder.layers, gguf.layers, strict=True):
        for one, other in ((got.q, want.q), (got.k, want.k)):
            rows = other.matrix.rows(slice(None)).reshape(-1, 16, 2, one.matrix.n_in)
            np.testing.assert_array_equal(
                one.matrix.rows(slice(None)), rows.transpose(0, 2, 1, 3).reshape(-1, one.matrix.n_in)
            )


@pytest.mark.parametrize(("name", "weights"), KINDS)
def test_it_computes_what_openvino_computes(name: str, weights: str) -> None:
    ids = tokens(50, seed=1)
    got = ReferenceEngine.load(tiny_ir(name, weights)).open(CONFIG).prefill(ids, 0).logits
    want = tiny_ir_engine(name, weights).open(CONFIG).prefill(ids, 0).logits
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_it_computes_what_an_export_with_norms_steps_of_4_bits_and_a_table_of_8_computes() -> None:
    from kvtape.backends.openvino.engine import OpenVinoEngine

    ids = tokens(50, seed=2)
    weights = Weights(exported_ir())
    assert weights.layers[0].q_norm is not None
    assert not np.allclose(weights.layers[0].q_norm, 1)
    assert not np.allclose(weights.output_norm, 1)
    got = ReferenceEngine.load(exported_ir()).open(CONFIG).prefill(ids, 0).logits
    want = OpenVinoEngine.load(exported_ir()).open(CONFIG).prefill(ids, 0).logits
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_texts_of_a_directory_go_through_its_tokenizer() -> None:
    engine = ReferenceEngine.load(tiny_ir())
    assert engine.detokenize(engine.tokenize("the cache holds")) == "the cache holds"


def scaled_rows(model: Any) -> None:
    """The rows that come out of the table of embeddings, times two."""
    looked_up = (n for n in model.get_ordered_ops() if n.get_type_name() == "Gather" and n.input_value(0).get_node())
    rows = next(n for n in looked_up if str(n.get_output_partial_shape(0)) == "[?,?,64]")
    readers = list(rows.output(0).get_target_inputs())
    twice = op.multiply(rows, op.constant(np.float32(2)))
    for target in readers:
        target.replace_source_output(twice.output(0))


def halved_logits(model: Any) -> None:
    result = model.get_results()[0]
    result.input(0).replace_source_output(op.multiply(result.input_value(0), op.constant(np.float32(0.5))).output(0))


def one_more_product(model: Any) -> None:
    """The logits go through a matrix of their own."""
    result = model.get_results()[0]
    more = op.matmul(result.input_value(0), op.constant(np.eye(320, dtype=np.float32)), False, False)
    result.input(0).replace_source_output(more.output(0))


@pytest.mark.parametrize(
    ("edit", "why"),
    [(halved_logits, "logits from Multiply"), (one_more_product, "norm"), (scaled_rows, "norm")],
    ids=["halved", "product", "scaled"],
)
def test_a_graph_that_computes_something_else_is_refused(edit: Callable[[Any], None], why: str, tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match=f"{why}.*the reference does not know this graph"):
        Weights(edited_ir(tiny_ir(), tmp_path / "ir", edit))


def test_a_graph_without_attention_nodes_is_refused(tmp_path: Path) -> None:
    from kvtape.backends.errors import UsageError

    with pytest.raises(UsageError, match="no ScaledDotProductAttention"):
        ReferenceEngine.load(edited_ir(tiny_ir(), tmp_path / "ir", with_plain_attention))
