"""OpenVINO model directories: saved by openvino-genai from GGUFs of the types that its reader takes exactly, and one
exported by optimum-intel."""

from __future__ import annotations

import functools
import json
import shutil
import tarfile
from pathlib import Path

from kvtape.backends.openvino.engine import OpenVinoEngine
from support.openvino_tiny import MODELS, scratch_folder
from support.tiny_gguf import write_tiny

__all__ = ["exported_ir", "save_ir", "tiny_ir", "tiny_ir_engine", "tiny_ir_source"]


def save_ir(gguf: Path, folder: Path, n_ctx_train: int | None = None) -> Path:
    """`folder`, new, with the model and tokenizer of `gguf` (F16 or Q8_0 matrices) as openvino-genai saves them.

    With `n_ctx_train` it gets the config.json that a directory from a model hub has, and that genai does not write.
    """
    import openvino_genai  # half a second, which not every test that takes a model directory spends

    folder.mkdir(parents=True)
    # It writes beside the file it reads; the file itself is no part of a model directory.
    inside = folder / gguf.name
    inside.symlink_to(gguf.absolute())
    try:
        openvino_genai.LLMPipeline(str(inside), "CPU", enable_save_ov_model=True)
    except BaseException:
        shutil.rmtree(folder)
        raise
    inside.unlink()
    if n_ctx_train is not None:
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": n_ctx_train}))
    return folder


def tiny_ir_source(name: str = "llama", weights: str = "f16") -> Path:
    """The GGUF that `tiny_ir` was made from; `name` is one of `openvino_tiny.MODELS`, `weights` f16 or q8_0."""
    return _source(name, weights)


def tiny_ir(name: str = "llama", weights: str = "f16") -> Path:
    """A model directory, made once a process (0.3 s)."""
    return _saved(name, weights)


def tiny_ir_engine(name: str = "llama", weights: str = "f16") -> OpenVinoEngine:
    """That directory on OpenVINO, loaded once a process."""
    return _loaded(name, weights)


@functools.cache  # a cache goes by how a function is called, with its defaults written out or not
def _source(name: str, weights: str) -> Path:
    return write_tiny(scratch_folder() / f"{name}-{weights}.gguf", **MODELS[name], weights=weights)


@functools.cache
def _saved(name: str, weights: str) -> Path:
    return save_ir(_source(name, weights), scratch_folder() / f"{name}-{weights}-ir", 4096)


@functools.cache
def exported_ir() -> Path:
    """A qwen3 of random weights (2 layers of 64 components) as optimum-intel 2.2.0 exports it, `--weight-format int4`.

    Its table of embeddings is u8, its matrices are i4 in groups of 32; there is no tokenizer. Kept as a file: exporting
    takes PyTorch.
    """
    folder = scratch_folder() / "exported-ir"
    with tarfile.open(Path(__file__).parents[1] / "backends/data/optimum-qwen3-int4.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


@functools.cache
def _loaded(name: str, weights: str) -> OpenVinoEngine:
    return OpenVinoEngine.load(_saved(name, weights))
