"""Write kvpress.json: what NVIDIA's kvpress keeps of a cache, and the scores that it goes by.

    python -m venv VENV && VENV/bin/pip install kvpress
    VENV/bin/python make_kvpress_golden.py > kvpress.json

kvpress is no dependency of kvtape and not of its suite: the file was written once. A tiny Llama with seeded random
weights reads seeded random tokens; each press compresses each layer of its cache in its own forward hook. What it kept
is read from the cache itself, by looking its key rows up among those of the uncompressed cache, and the scores that it
went by are taken from its own `score` while it ran. Nothing of kvtape is imported here.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import kvpress
import torch
import transformers
from kvpress import ObservedAttentionPress, SnapKVPress, StreamingLLMPress, TOVAPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

LAYERS, HEADS, HEAD_DIM, VOCAB = 2, 4, 16, 97
BUDGETS = {24: (6, 13), 61: (9, 20, 44)}
"""By length of the text, in tokens."""

MODELS = {"shared": (1, (24, 61)), "grouped": (2, (24,))}
"""KV heads, and lengths of text. With one KV head a press keeps one set of tokens a layer, with two it keeps two."""


def make_model(kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(20)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        initializer_range=0.35,  # sharper than usual, so that attention is far from even
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def window_of(n: int) -> int:
    return 4 if n < 40 else 8


def presses(n: int, budget: int) -> list[tuple[str, dict[str, int], Any]]:
    # The press takes int(n * (1 - ratio)): half a token more, so that rounding cannot take one away.
    ratio = 1 - (budget + 0.5) / n
    window = window_of(n)
    return [
        ("streaming_llm", {"n_sink": 4}, StreamingLLMPress(ratio, n_sink=4)),
        ("observed_attention", {}, ObservedAttentionPress(ratio)),
        ("tova", {}, TOVAPress(ratio)),
        *(
            (
                "snapkv",
                {"window_size": window, "kernel_size": kernel},
                SnapKVPress(ratio, window_size=window, kernel_size=kernel),
            )
            for kernel in (1, 5)
        ),
    ]


@torch.no_grad()
def forward(model: LlamaForCausalLM, tokens: torch.Tensor, press: Any = None) -> tuple[Any, list[Any]]:
    """The cache after a prefill, and the attention weights of each layer `[heads, queries, keys]`."""
    cache = DynamicCache()
    if press is None:
        out = model(tokens, past_key_values=cache, output_attentions=True)
    else:
        with press(model):
            out = model(tokens, past_key_values=cache, output_attentions=True)
    return cache, [a[0] for a in out.attentions]


def kept_of(cache: Any, whole: Any, layer: int) -> list[list[int]]:
    """Per KV head the positions whose keys are still in the cache. A press leaves what the layers compute alone."""
    found = []
    for rows, every in zip(cache.layers[layer].keys[0], whole.layers[layer].keys[0], strict=True):
        match = (rows[:, None, :] == every[None, :, :]).all(-1)
        assert (match.sum(1) == 1).all(), "each kept row is one row of the uncompressed cache"
        found.append(sorted(match.int().argmax(1).tolist()))
    return found


def noting(press: Any) -> list[torch.Tensor]:
    """The scores `[kv_heads, keys]` of each layer, in the order in which the press makes them."""
    made: list[torch.Tensor] = []
    scored = press.score

    def score(*args: Any, **rest: Any) -> torch.Tensor:
        made.append(scored(*args, **rest))
        return made[-1]

    press.score = score
    return made


def rounded(values: torch.Tensor) -> list[Any]:
    """Nine digits: enough to tell any two float32 apart."""
    return json.loads(json.dumps(values.tolist()), parse_float=lambda x: float(f"{float(x):.9g}"))


def cases_of(model: LlamaForCausalLM, name: str, n: int) -> list[dict[str, Any]]:
    """What each press keeps in each layer, by budget, and the scores that it goes by."""
    tokens = text(n)
    whole, attention = forward(model, tokens)
    cases: dict[tuple[int, int], dict[str, Any]] = {}
    for budget in BUDGETS[n]:
        for number, (press_name, options, press) in enumerate(presses(n, budget)):
            made = noting(press)
            cache, seen = forward(model, tokens, press)
            assert all(torch.equal(a, b) for a, b in zip(seen, attention, strict=True)), "the prefill is the same"
            for layer in range(LAYERS):
                known = {"model": name, "press": press_name, "options": options, "n": n, "layer": layer}
                case = cases.setdefault((number, layer), known | {"kept": {}})
                case["kept"][str(budget)] = kept_of(cache, whole, layer)
                if press_name != "streaming_llm":
                    case["scores"] = rounded(made[layer][0])
    return list(cases.values())


def mass_of(model: LlamaForCausalLM, n: int) -> list[dict[str, Any]]:
    """Attention per key, summed over heads and all queries, or those of the last window, or the last alone."""
    found = []
    for layer, weights in enumerate(forward(model, text(n))[1]):
        by_query, window = weights.double().sum(0), window_of(n)
        sums = {"all": by_query.sum(0), "window": by_query[-window:].sum(0), "last": by_query[-1]}
        found.append({"n": n, "layer": layer, "window_size": window} | {k: rounded(v) for k, v in sums.items()})
    return found


def text(n: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, n), generator=torch.Generator().manual_seed(n))


def main() -> None:
    cases, mass = [], []
    for name, (kv_heads, lengths) in MODELS.items():
        model = make_model(kv_heads)
        for n in lengths:
            cases += cases_of(model, name, n)
            mass += mass_of(model, n) if name == "shared" else []
    versions = {"kvpress": kvpress_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    json.dump({"versions": versions, "heads": HEADS, "cases": cases, "mass": mass}, sys.stdout, separators=(",", ":"))
    sys.stdout.write("\n")


def kvpress_version() -> str:
    from importlib.metadata import version

    return version(kvpress.__name__)


if __name__ == "__main__":
    main()
