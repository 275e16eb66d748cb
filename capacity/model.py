"""The shape of a model and its fingerprint, read from a GGUF file or from the folder of an OpenVINO model.

`gguf` is imported where a file is read, so that importing this module stays cheap.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.fingerprint import fingerprint
from kvtape.capacity.gguf_file import array_length, open_gguf
from kvtape.capacity.ir_files import ir_graph_file
from kvtape.capacity.ir_model import read_ir_model
from kvtape.capacity.layers import model_kv
from kvtape.capacity.metadata import metadata_of
from kvtape.capacity.shape import ModelShape, RopePairs
from kvtape.capacity.source import weights_of_all_parts

__all__ = ["ModelFileError", "ModelShape", "RopePairs", "read_model"]

# llama.cpp's rope type per architecture (llama_model_rope_type): NORM rotates neighbours, NEOX rotates halves.
_INTERLEAVED = frozenset({"llama", "deepseek", "deepseek2", "mistral3", "minicpm", "granite"})


_END_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def read_model(path: str | Path) -> ModelShape:
    """Read a GGUF header (some 50 ms for a vocabulary of 49k; once per file and process), or an OpenVINO graph's.

    Raises ModelFileError.
    """
    file = Path(path)
    if file.is_dir():
        ir_graph_file(file)
        stats = [(entry.name, entry.stat()) for entry in sorted(file.iterdir())]
        return _read_ir(str(file), tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats))
    if not file.is_file():
        raise ModelFileError(f"{file}: no such model file; give the path of a GGUF, or the folder of an OpenVINO model")
    stat = file.stat()
    return _read(str(file), stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=16)
def _read(path: str, size: int, mtime_ns: int) -> ModelShape:
    """Size and time of change are part of the key: a rewritten file is read again."""
    try:
        return _shape(Path(path), open_gguf(path))
    except ModelFileError:
        raise
    except (TypeError, ValueError) as err:  # a number that is a text or a list
        raise ModelFileError(f"{path}: damaged GGUF ({err}); copy or download it again") from None


@lru_cache(maxsize=16)
def _read_ir(path: str, files: tuple[tuple[str, int, int], ...]) -> ModelShape:
    """As `_read`, by all files of the folder."""
    return read_ir_model(Path(path))


def _shape(file: Path, reader: Any) -> ModelShape:
    fields = reader.fields

    def value(key: str, default: Any = None) -> Any:
        if key in fields:
            return fields[key].contents()
        if default is None:
            raise ModelFileError(f"{file}: the GGUF lacks {key}; kvtape needs a decoder model")
        return default

    arch = str(value("general.architecture"))
    meta = metadata_of(reader, str(file))
    tensors = {t.name: t for t in reader.tensors}
    n_embd = int(value(f"{arch}.embedding_length"))
    n_head = _scalar(value(f"{arch}.attention.head_count", 0))
    head_dim = int(value(f"{arch}.attention.key_length", n_embd // n_head if n_head else 0) or 0)
    n_vocab = array_length(fields["tokenizer.ggml.tokens"]) if "tokenizer.ggml.tokens" in fields else 0
    return ModelShape(
        path=str(file),
        fingerprint=fingerprint(file, reader, arch),
        arch=arch,
        n_layer=int(value(f"{arch}.block_count")),
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=_scalar(value(f"{arch}.attention.head_count_kv", n_head)),
        head_dim_k=head_dim,
        head_dim_v=int(value(f"{arch}.attention.value_length", head_dim)),
        n_vocab=n_vocab,
        n_ctx_train=int(value(f"{arch}.context_length")),
        rms_eps=float(value(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)),
        rope_base=float(value(f"{arch}.rope.freq_base", 10000.0)),
        rope_dims=int(value(f"{arch}.rope.dimension_count", head_dim)),
        rope_pairs="interleaved" if arch in _INTERLEAVED else "halves",
        rope_scaling=str(value(f"{arch}.rope.scaling.type", "none")),
        sliding_window=int(value(f"{arch}.attention.sliding_window", 0)),
        qk_norm="blk.0.attn_k_norm.weight" in tensors,
        tensor_types=frozenset(t.tensor_type.name for t in reader.tensors),
        tokenizer=str(value("tokenizer.ggml.model", "none")),
        end_tokens=frozenset(int(fields[key].contents()) for key in _END_KEYS if key in fields),
        geometry=model_kv(meta).geometry,
        weights_bytes=weights_of_all_parts(file, meta, sum(int(t.n_bytes) for t in reader.tensors)),
    )


def _scalar(count: Any) -> int:
    """A head count; per-layer arrays give their largest entry."""
    return max(int(c) for c in count) if isinstance(count, list | tuple) else int(count)
