"""Tiny random-weight GGUF models: milliseconds to write, to load and to run, yet real models to every engine.

`write_tiny` needs only the gguf package. Weights are drawn from a seeded generator, so one call gives one file. The
vocabulary is byte-level BPE: 3 control tokens, the 256 bytes, and a few merges, so any UTF-8 text tokenises.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

__all__ = ["BOS", "CONTROL_TOKENS", "EOS", "TINY_ARCHS", "TinyShape", "byte_bpe_vocabulary", "write_tiny"]

TINY_ARCHS = (
    "gemma2",
    "gemma3",
    "gpt-oss",
    "lfm2",
    "llama",
    "mamba",
    "qwen2",
    "qwen2moe",
    "qwen2vl",
    "qwen3",
    "qwen3moe",
)
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
BOS, EOS = 1, 2

_QUANTISED = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q8_0": 7}
_BIASED = frozenset({"gpt-oss", "qwen2", "qwen2moe", "qwen2vl"})
_QK_NORMED = frozenset({"gemma3", "lfm2", "qwen3", "qwen3moe"})
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_MERGE_CORPUS = (
    "the cache holds the keys and the values of the tokens that the model has seen and the planner "
    "decides which of them to keep when the window is full so that the next token can find its place"
)


@dataclass(frozen=True, slots=True)
class TinyShape:
    """What `write_tiny` writes. Sizes count components, heads, layers, tokens.

    `head_dim` None gives n_embd // n_head. `weights` is the type of the matrices: f32, f16, q8_0, q4_0 (vectors stay
    f32). `yarn` is the YaRN factor over n_ctx // yarn original tokens, 0 for plain RoPE. `window` is the sliding window
    of gemma3, whose layers are windowed but for every 6th, of gemma2 and gpt-oss, where every second is, and of lfm2,
    where all attention is; `window_period` writes the key that changes the period. `sink_weight` is the
    learned sink logit of every head of gpt-oss. `kv_heads` gives the KV heads of each layer of lfm2; a 0
    makes that layer a short convolution. A row goes through `n_expert_used` of `n_expert` experts, where there are any;
    qwen2moe has a shared one beside them. `qk_gain` above 1 makes attention peaky. `tied` leaves the output matrix out.
    """

    arch: str = "llama"
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 2
    n_head_kv: int = 1
    head_dim: int | None = None
    n_ff: int = 128
    n_ctx: int = 4096
    weights: str = "f32"
    seed: int = 0
    rope_base: float = 10000.0
    qk_gain: float = 1.0
    yarn: int = 0
    window: int = 0
    window_period: int | None = None
    sink_weight: float = 0.0
    kv_heads: tuple[int, ...] = ()
    n_expert: int = 0
    n_expert_used: int = 2
    n_merges: int = 61
    tied: bool = False

    @property
    def head_size(self) -> int:
        return self.head_dim or self.n_embd // self.n_head

    def layer_kv_heads(self, layer: int) -> int:
        return self.kv_heads[layer] if self.kv_heads else self.n_head_kv


_ARCH_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {"n_layer": 4, "window": 64, "tied": True},
    "gemma3": {"n_layer": 6, "window": 64},
    "gpt-oss": {"window": 64, "n_expert": 4},
    "lfm2": {"n_layer": 4, "kv_heads": (0, 1, 0, 1)},
    "qwen2moe": {"n_expert": 6},
    "qwen3moe": {"n_expert": 6},
}


def write_tiny(path: str | Path, arch: str = "llama", **overrides: Any) -> Path:
    """Write a tiny model of `arch` (one of `TINY_ARCHS`) and return its path.

    `overrides` are fields of `TinyShape`. Raises ValueError for an arch or a weight type it cannot write, TypeError
    for a field that does not exist.
    """
    shape = TinyShape(arch=arch, **{**_ARCH_DEFAULTS.get(arch, {}), **overrides})
    if arch not in TINY_ARCHS:
        raise ValueError(f"cannot write a tiny {arch!r}; known: {', '.join(TINY_ARCHS)}")
    if shape.weights not in _FILE_TYPES:
        raise ValueError(f"cannot write {shape.weights!r} weights; known: {', '.join(sorted(_FILE_TYPES))}")
    if shape.kv_heads and len(shape.kv_heads) != shape.n_layer:
        raise ValueError(f"kv_heads has {len(shape.kv_heads)} entries for {shape.n_layer} layers")
    target = Path(path)
    writer = gguf.GGUFWriter(target, arch)
    n_vocab = _write_vocabulary(writer, shape)
    _write_metadata(writer, shape)
    _Weights(writer, shape).write(n_vocab)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def byte_bpe_vocabulary(n_merges: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, token types and merges: control tokens, the 256 bytes in order, then up to `n_merges` merged pairs."""
    letters = _byte_letters()
    tokens = [*CONTROL_TOKENS, *letters]
    types = [int(gguf.TokenType.CONTROL)] * len(CONTROL_TOKENS) + [int(gguf.TokenType.NORMAL)] * len(letters)
    words = Counter(tuple(letters[b] for b in f" {word}".encode()) for word in _MERGE_CORPUS.split())
    merges: list[str] = []
    while len(merges) < n_merges:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, count in words.items():
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        left, right = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(f"{left} {right}")
        tokens.append(left + right)
        types.append(int(gguf.TokenType.NORMAL))
        words = Counter({_merge(word, left, right): count for word, count in words.items()})
    return tokens, types, merges


def _byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each of the 256 bytes."""
    printable = {*range(33, 127), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    letters: list[str] = []
    n_replaced = 0
    for byte in range(256):
        letters.append(chr(byte) if byte in printable else chr(256 + n_replaced))
        n_replaced += byte not in printable
    return letters


def _merge(word: tuple[str, ...], left: str, right: str) -> tuple[str, ...]:
    out: list[str] = []
    i = 0
    while i < len(word):
        pair = word[i] == left and word[i + 1 : i + 2] == (right,)
        out.append(left + right if pair else word[i])
        i += 2 if pair else 1
    return tuple(out)


def _write_vocabulary(writer: gguf.GGUFWriter, shape: TinyShape) -> int:
    """Returns the number of tokens."""
    tokens, types, merges = byte_bpe_vocabulary(shape.n_merges)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_chat_template(_CHAT_TEMPLATE)
    writer.add_vocab_size(len(tokens))
    return len(tokens)


def _write_metadata(writer: gguf.GGUFWriter, shape: TinyShape) -> None:
    writer.add_name(f"tiny-{shape.arch}")
    writer.add_file_type(_FILE_TYPES[shape.weights])
    writer.add_context_length(shape.n_ctx)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layer)
    writer.add_layer_norm_rms_eps(1e-5)
    if shape.arch == "mamba":
        _write_mamba_metadata(writer, shape)
        return
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(list(shape.kv_heads) if shape.kv_heads else shape.n_head_kv)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_rope_dimension_count(shape.head_size)
    if shape.window:
        writer.add_sliding_window(shape.window)
    if shape.window_period is not None:
        writer.add_sliding_window_pattern(shape.window_period)
    if shape.yarn:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(shape.yarn))
        writer.add_rope_scaling_orig_ctx_len(shape.n_ctx // shape.yarn)
    if shape.arch == "qwen2vl":
        half = shape.head_size // 2
        writer.add_rope_dimension_sections([half // 2, half // 4, half // 4, 0])
    if shape.arch == "lfm2":
        writer.add_shortconv_l_cache(3)
    if shape.n_expert:
        writer.add_expert_count(shape.n_expert)
        writer.add_expert_used_count(shape.n_expert_used)
        writer.add_expert_feed_forward_length(shape.n_ff)
    if shape.arch == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(shape.n_ff)


def _write_mamba_metadata(writer: gguf.GGUFWriter, shape: TinyShape) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(_Weights.MAMBA_KERNEL)
    writer.add_ssm_inner_size(2 * shape.n_embd)
    writer.add_ssm_state_size(_Weights.MAMBA_STATE)
    writer.add_ssm_time_step_rank(_Weights.MAMBA_STEP_RANK)


class _Weights:
    """Draws the tensors of one model, in the order in which they are written."""

    MAMBA_KERNEL, MAMBA_STATE, MAMBA_STEP_RANK = 4, 8, 4

    def __init__(self, writer: gguf.GGUFWriter, shape: TinyShape) -> None:
        self._writer = writer
        self._shape = shape
        self._rng = np.random.default_rng(shape.seed)

    def write(self, n_vocab: int) -> None:
        shape = self._shape
        self._matrix("token_embd", n_vocab, shape.n_embd, gain=shape.n_embd**0.5)
        self._ones("token_embd_norm" if shape.arch == "lfm2" else "output_norm", shape.n_embd)
        if not shape.tied:
            self._matrix("output", n_vocab, shape.n_embd)
        for layer in range(shape.n_layer):
            self._block(layer)

    def _block(self, layer: int) -> None:
        block = f"blk.{layer}."
        self._ones(block + "attn_norm", self._shape.n_embd)
        if self._shape.arch == "mamba":
            self._mamba(block)
            return
        if self._shape.layer_kv_heads(layer):
            self._attention(block, self._shape.layer_kv_heads(layer))
        else:
            self._short_convolution(block)
        if self._shape.n_expert:
            self._experts(block)
        else:
            self._feed_forward(block)

    def _attention(self, block: str, n_head_kv: int) -> None:
        shape = self._shape
        wide, narrow = shape.n_head * shape.head_size, n_head_kv * shape.head_size
        self._matrix(block + "attn_q", wide, shape.n_embd, gain=shape.qk_gain)
        self._matrix(block + "attn_k", narrow, shape.n_embd, gain=shape.qk_gain)
        self._matrix(block + "attn_v", narrow, shape.n_embd)
        self._matrix(block + "attn_output", shape.n_embd, wide)
        if shape.arch in _BIASED:
            for name, size in (("attn_q", wide), ("attn_k", narrow), ("attn_v", narrow)):
                self._bias(block + name, size)
        if shape.arch in _QK_NORMED:
            self._ones(block + "attn_q_norm", shape.head_size)
            self._ones(block + "attn_k_norm", shape.head_size)
        if shape.arch in ("gemma2", "gemma3", "gpt-oss"):
            self._ones(block + "post_attention_norm", shape.n_embd)
        if shape.arch == "gpt-oss":
            self._bias(block + "attn_output", shape.n_embd)
            self._add(block + "attn_sinks.weight", np.full(shape.n_head, shape.sink_weight))

    def _short_convolution(self, block: str) -> None:
        width = self._shape.n_embd
        self._add(block + "shortconv.conv.weight", self._draw(width, 3))
        self._matrix(block + "shortconv.in_proj", 3 * width, width)
        self._matrix(block + "shortconv.out_proj", width, width)

    def _feed_forward(self, block: str) -> None:
        shape = self._shape
        self._ones(block + "ffn_norm", shape.n_embd)
        self._matrix(block + "ffn_gate", shape.n_ff, shape.n_embd)
        self._matrix(block + "ffn_up", shape.n_ff, shape.n_embd)
        self._matrix(block + "ffn_down", shape.n_embd, shape.n_ff)
        if shape.arch in ("gemma2", "gemma3"):
            self._ones(block + "post_ffw_norm", shape.n_embd)

    def _experts(self, block: str) -> None:
        """Those of gpt-oss have biases and stay f32; qwen2moe has one more that every row goes through."""
        shape = self._shape
        width, inner, n = shape.n_embd, shape.n_ff, shape.n_expert
        biased = shape.arch == "gpt-oss"
        if biased:
            self._matrix(block + "ffn_gate_inp", n, width)
            self._bias(block + "ffn_gate_inp", n)
        else:
            self._ones(block + "ffn_norm", width)
            self._add(block + "ffn_gate_inp.weight", self._draw(n, width, gain=2.0))
        for name, rows, columns in (("gate", inner, width), ("up", inner, width), ("down", width, inner)):
            drawn = np.stack([self._draw(rows, columns) for _ in range(n)])
            if biased:
                self._add(f"{block}ffn_{name}_exps.weight", drawn)
                self._add(f"{block}ffn_{name}_exps.bias", self._rng.standard_normal((n, rows)) * 0.02)
            else:
                self._store(f"{block}ffn_{name}_exps.weight", drawn)
        if shape.arch == "qwen2moe":
            self._add(block + "ffn_gate_inp_shexp.weight", self._rng.standard_normal(width) / np.sqrt(width))
            self._matrix(block + "ffn_gate_shexp", inner, width)
            self._matrix(block + "ffn_up_shexp", inner, width)
            self._matrix(block + "ffn_down_shexp", width, inner)

    def _mamba(self, block: str) -> None:
        width, inner = self._shape.n_embd, 2 * self._shape.n_embd
        state, rank = self.MAMBA_STATE, self.MAMBA_STEP_RANK
        self._matrix(block + "ssm_in", 2 * inner, width)
        self._add(block + "ssm_conv1d.weight", self._draw(inner, self.MAMBA_KERNEL))
        self._bias(block + "ssm_conv1d", inner)
        self._matrix(block + "ssm_x", rank + 2 * state, inner)
        self._add(block + "ssm_dt.weight", self._draw(inner, rank))
        self._bias(block + "ssm_dt", inner)
        self._add(block + "ssm_a", -np.abs(self._rng.standard_normal((inner, state))) - 0.1)
        self._add(block + "ssm_d", np.ones(inner))
        self._matrix(block + "ssm_out", width, inner)

    def _draw(self, rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        """`[rows, columns]` = [out, in], scaled so that a unit input gives outputs of size `gain`."""
        values = self._rng.standard_normal((rows, columns)) * gain / np.sqrt(columns)
        return np.asarray(values, dtype=np.float32)

    def _matrix(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        self._store(name + ".weight", self._draw(rows, columns, gain))

    def _store(self, name: str, values: npt.NDArray[np.float32]) -> None:
        """One matrix or a stack of them, in the type that was asked for."""
        weights = self._shape.weights
        if weights in _QUANTISED:
            packed = gguf.quants.quantize(values, _QUANTISED[weights])
            self._writer.add_tensor(name, packed, raw_dtype=_QUANTISED[weights])
        else:
            self._writer.add_tensor(name, values.astype(np.float16 if weights == "f16" else np.float32))

    def _ones(self, name: str, size: int) -> None:
        self._add(name + ".weight", np.ones(size))

    def _bias(self, name: str, size: int) -> None:
        self._add(name + ".bias", self._rng.standard_normal(size) * 0.02)

    def _add(self, name: str, values: npt.NDArray[Any]) -> None:
        self._writer.add_tensor(name, values.astype(np.float32))
