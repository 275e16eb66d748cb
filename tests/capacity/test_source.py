"""A model in several files weighs what all of them hold."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.model import read_model
from kvtape.capacity.source import read_model_kv


def write_part(path: Path, n_values: int, count: int = 3, *, keys: bool = False) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint16("split.count", count)
    if keys:
        writer.add_block_count(2)
        writer.add_context_length(512)
        writer.add_embedding_length(64)
        writer.add_head_count(2)
    writer.add_tensor(f"w{n_values}", np.zeros(n_values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_all_parts_are_counted(tmp_path: Path) -> None:
    first = write_part(tmp_path / "m-of-x-00001-of-00003.gguf", 32, keys=True)
    for number, n_values in ((2, 64), (3, 96)):
        write_part(tmp_path / f"m-of-x-0000{number}-of-00003.gguf", n_values)
    assert read_model_kv(first).weights_bytes == read_model(first).weights_bytes == 4 * (32 + 64 + 96)


def test_a_missing_part_and_a_name_that_leads_nowhere(tmp_path: Path) -> None:
    first = write_part(tmp_path / "m-00001-of-00003.gguf", 32, keys=True)
    for read in (read_model_kv, read_model):
        with pytest.raises(ModelFileError, match=r"m-00002-of-00003\.gguf: no such model file"):
            read(first)
    renamed = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"renamed\.gguf: one of 3 parts.*-00001-of-00003\.gguf"):
        read_model_kv(renamed)


def test_one_part_is_the_whole(tmp_path: Path) -> None:
    path = write_part(tmp_path / "m.gguf", 32, count=1, keys=True)
    assert read_model_kv(path).weights_bytes == 128
