"""Write a draft model that knows nothing: one small layer of random weights under another model's vocabulary.

    python benchmarks/random_draft.py MODEL.gguf DRAFT.gguf

What it proposes is practically never right, so it shows what speculation costs where drafts are bad (docs/gate.md).
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

EMBEDDING, FEED_FORWARD, HEADS, SEED = 64, 128, 2, 1


def tensors(n_vocab: int) -> dict[str, npt.NDArray[np.float16 | np.float32]]:
    """By name, rows first as GGUF stores them; the output head is the embedding."""
    rng = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> npt.NDArray[np.float16]:
        return (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float16)

    one = np.ones(EMBEDDING, np.float32)
    square = {name: matrix(EMBEDDING, EMBEDDING) for name in ("attn_q", "attn_k", "attn_v", "attn_output")}
    ffn = {
        "ffn_gate": matrix(FEED_FORWARD, EMBEDDING),
        "ffn_up": matrix(FEED_FORWARD, EMBEDDING),
        "ffn_down": matrix(EMBEDDING, FEED_FORWARD),
        "attn_norm": one,
        "ffn_norm": one,
    }
    layer = {f"blk.0.{name}.weight": values for name, values in (square | ffn).items()}
    return {"token_embd.weight": matrix(n_vocab, EMBEDDING), "output_norm.weight": one, **layer}


def write(source: Path, target: Path) -> None:
    """`target`: the vocabulary and the trained context of `source`, nothing else of it."""
    reader = gguf.GGUFReader(str(source))
    n_vocab = len(reader.fields["tokenizer.ggml.tokens"].data)
    arch = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name("random draft")
    writer.add_context_length(int(reader.fields[f"{arch}.context_length"].contents()))
    writer.add_embedding_length(EMBEDDING)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(EMBEDDING // HEADS)
    writer.add_vocab_size(n_vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for name, values in tensors(n_vocab).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
