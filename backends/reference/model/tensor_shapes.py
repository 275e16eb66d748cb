"""What size each tensor has to have, from the model's own sizes: a file of other sizes is refused when it is opened.

Without this a vector of one component would be spread over a row, and a matrix of another width be an error of the
array library in the middle of a forward, or none at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from kvtape.capacity.model import ModelShape

__all__ = ["shape_obstacle"]

_BLOCK: Final = re.compile(r"blk\.\d+\.")

# Sizes in the file's order, the input first. A size without a number (`ff`, `experts`, ...) is that of the tensor in
# which it comes first, for the others of its layer to have too.
_GATED: Final = {
    "ffn_gate{}.weight": ("embd", "ff{}"),
    "ffn_up{}.weight": ("embd", "ff{}"),
    "ffn_down{}.weight": ("ff{}", "embd"),
    "ffn_gate{}.bias": ("ff{}",),
    "ffn_up{}.bias": ("ff{}",),
    "ffn_down{}.bias": ("embd",),
}
_EXPERTS: Final = {
    "ffn_gate_inp.weight": ("embd", "experts"),
    "ffn_gate_inp.bias": ("experts",),
    "ffn_gate_exps.weight": ("embd", "ff of experts", "experts"),
    "ffn_up_exps.weight": ("embd", "ff of experts", "experts"),
    "ffn_down_exps.weight": ("ff of experts", "embd", "experts"),
    "ffn_gate_inp_shexp.weight": ("embd",),
}
_OF_A_LAYER: Final = {
    "attn_norm.weight": ("embd",),
    "attn_q.weight": ("embd", "queries"),
    "attn_q.bias": ("queries",),
    "attn_k.weight": ("embd", "keys"),
    "attn_k.bias": ("keys",),
    "attn_v.weight": ("embd", "values"),
    "attn_v.bias": ("values",),
    "attn_output.weight": ("attended", "embd"),
    "attn_output.bias": ("embd",),
    "attn_q_norm.weight": ("head",),
    "attn_k_norm.weight": ("head",),
    "post_attention_norm.weight": ("embd",),
    "ffn_norm.weight": ("embd",),
    "post_ffw_norm.weight": ("embd",),
    **_EXPERTS,
    **{
        name.format(kind): tuple(size.format(kind) for size in sizes)
        for kind in ("", "_shexp")
        for name, sizes in _GATED.items()
    },
}
_OF_THE_MODEL: Final = {
    "token_embd.weight": ("embd", "vocab"),
    "output.weight": ("embd", "vocab"),
    "output_norm.weight": ("embd",),
    "rope_freqs.weight": ("rotated pairs",),
}


def shape_obstacle(tensors: Iterable[Any], shape: ModelShape) -> str | None:
    """The first of `tensors` (the gguf library's) whose size is not the one that `shape` gives it; None for none."""
    known = _sizes(shape)
    layers: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        name = str(tensor.name)
        block = _BLOCK.match(name)
        sizes = layers.setdefault(block[0], dict(known)) if block else known
        wanted = (_OF_A_LAYER if block else _OF_THE_MODEL).get(name[block.end() :] if block else name)
        given = tuple(int(n) for n in tensor.shape)
        if wanted is None:
            continue
        for size, n in zip(wanted, given, strict=False):
            sizes.setdefault(size, n)
        due = tuple(sizes.get(size, 1) for size in wanted)
        # Some files write a vector as a matrix of one row.
        if given not in (due, (*due, 1) if len(due) == 1 else due):
            return f"{name} is {_written(given)}, and a model of its sizes has {_written(due)} there"
    return None


def _sizes(shape: ModelShape) -> dict[str, int]:
    """`vocab`: of the tokeniser, where the file has one."""
    sizes: Mapping[str, int] = {
        "embd": shape.n_embd,
        "queries": shape.n_head * shape.head_dim_k,
        "keys": shape.n_head_kv * shape.head_dim_k,
        "values": shape.n_head_kv * shape.head_dim_v,
        "attended": shape.n_head * shape.head_dim_v,
        "head": shape.head_dim_k,
        "rotated pairs": shape.rope_dims // 2,
        "vocab": shape.n_vocab,
    }
    return {name: n for name, n in sizes.items() if n or name != "vocab"}


def _written(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))
