"""Backends for the conformance suite: `pytest --kvtape-backend support.conformance_backends:llama`."""

from __future__ import annotations

import dataclasses

from kvtape.backends.protocol import Backend, SessionConfig
from kvtape.testing.toy import open_toy as toy_again
from support import llama_tiny, openvino_tiny, reference_tiny
from support import openvino_ir as ir

__all__ = [
    "llama",
    "llama_q8_0",
    "openvino",
    "openvino_bf16",
    "openvino_ir",
    "openvino_u8",
    "openvino_without_mirror",
    "reference",
    "reference_markov_rs",
    "toy_again",
]


def llama(config: SessionConfig) -> Backend:
    return llama_tiny.engine().open(config)


def llama_q8_0(config: SessionConfig) -> Backend:
    """Packed rows, 8 bits a number, under flash attention."""
    asked = dataclasses.replace(config, kv_type_k="q8_0", kv_type_v="q8_0", flash_attention="on", uncertified=True)
    return llama_tiny.engine(n_embd=128, n_head=2, n_head_kv=1, head_dim=64).open(asked)


def openvino(config: SessionConfig) -> Backend:
    return openvino_tiny.tiny_engine("llama").open(config)


def openvino_without_mirror(config: SessionConfig) -> Backend:
    """Rows cannot be removed here: every eviction is a recompute."""
    options = {**config.options, "mirror": "off"}
    return openvino_tiny.tiny_engine("llama").open(dataclasses.replace(config, options=options))


def _stored_as(config: SessionConfig, kv_type: str) -> Backend:
    options = {**config.options, "kv": "asked"}
    asked = dataclasses.replace(config, kv_type_k=kv_type, kv_type_v=kv_type, options=options, uncertified=True)
    return openvino_tiny.tiny_engine("llama").open(asked)


def openvino_u8(config: SessionConfig) -> Backend:
    """Rows of 256 levels, of which the host copy keeps what they were."""
    return _stored_as(config, "u8")


def openvino_bf16(config: SessionConfig) -> Backend:
    """Computed and kept in bf16."""
    return _stored_as(config, "bf16")


def reference(config: SessionConfig) -> Backend:
    return reference_tiny.engine().open(config)


def reference_markov_rs(config: SessionConfig) -> Backend:
    """A KV engine that keeps no keys: every eviction is a recompute, every row of the witness is made again."""
    options = {**config.options, "engine": "markov-rs"}
    return reference_tiny.engine().open(dataclasses.replace(config, options=options))


def openvino_ir(config: SessionConfig) -> Backend:
    """A model directory as openvino-genai saves it."""
    return ir.tiny_ir_engine("llama-two-kv-heads", "f16").open(config)
