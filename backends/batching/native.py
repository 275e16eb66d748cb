"""kvtape's configuration as openvino-genai's objects."""

from __future__ import annotations

from typing import Any

from kvtape.backends.batching.config import BatchingConfig, Eviction, Sparse

__all__ = ["forced_generation", "scheduler"]


def forced_generation(genai: Any, n: int, text: str | None, *, echo: bool) -> Any:
    """`n` greedy tokens with their log-probabilities; with `text`, those alone that spell it."""
    config = genai.GenerationConfig()
    config.max_new_tokens = n
    config.ignore_eos = True
    config.do_sample = False
    config.logprobs = 1
    config.echo = echo
    if text is not None:
        forced = genai.StructuredOutputConfig()
        forced.grammar = f'root ::= "{_escaped(text)}"'
        config.structured_output_config = forced
    return config


def _escaped(text: str) -> str:
    for plain, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, written)
    return text


def scheduler(genai: Any, config: BatchingConfig) -> Any:
    """A cache of a fixed number of blocks, and the options that `config` names."""
    made = genai.SchedulerConfig()
    made.num_kv_blocks = config.blocks
    made.max_num_batched_tokens = config.chunk
    made.dynamic_split_fuse = True
    made.enable_prefix_caching = config.prefix_caching
    if config.eviction is not None:
        made.use_cache_eviction = True
        made.cache_eviction_config = _eviction(genai, config.eviction)
    if config.sparse is not None:
        made.use_sparse_attention = True
        made.sparse_attention_config = _sparse(genai, config.sparse)
    return made


def _eviction(genai: Any, asked: Eviction) -> Any:
    more = {}
    if asked.crush:
        more["kvcrush_config"] = genai.KVCrushConfig(asked.crush, genai.KVCrushAnchorPointMode.MEAN)
    mode = getattr(genai.AggregationMode, asked.aggregation.upper())
    return genai.CacheEvictionConfig(
        asked.start, asked.recent, asked.most, mode, apply_rotation=asked.rotation,
        snapkv_window_size=asked.window, **more,
    )  # fmt: skip


def _sparse(genai: Any, asked: Sparse) -> Any:
    return genai.SparseAttentionConfig(
        getattr(genai.SparseAttentionMode, asked.mode.upper()),
        num_last_dense_tokens_in_prefill=asked.dense,
        num_retained_start_tokens_in_cache=asked.start,
        num_retained_recent_tokens_in_cache=asked.recent,
        xattention_threshold=asked.threshold,
    )
