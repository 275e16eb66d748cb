"""Backends for the conformance suite: `pytest --kvtape-backend support.conformance_backends:llama`."""

from __future__ import annotations

import dataclasses

from kvtape.backends.protocol import Backend, SessionConfig
from kvtape.testing.toy import open_toy as toy_again
from support import llama_tiny, openvino_tiny, reference_tiny

__all__ = ["llama", "openvino", "openvino_without_mirror", "reference", "reference_markov_rs", "toy_again"]


def llama(config: SessionConfig) -> Backend:
    return llama_tiny.engine().open(config)


def openvino(config: SessionConfig) -> Backend:
    return openvino_tiny.tiny_engine("llama").open(config)


def openvino_without_mirror(config: SessionConfig) -> Backend:
    """Rows cannot be removed here: every eviction is a recompute."""
    options = {**config.options, "mirror": "off"}
    return openvino_tiny.tiny_engine("llama").open(dataclasses.replace(config, options=options))


def reference(config: SessionConfig) -> Backend:
    return reference_tiny.engine().open(config)


def reference_markov_rs(config: SessionConfig) -> Backend:
    """A KV engine that keeps no keys: every eviction is a recompute, every row of the witness is made again."""
    options = {**config.options, "engine": "markov-rs"}
    return reference_tiny.engine().open(dataclasses.replace(config, options=options))
