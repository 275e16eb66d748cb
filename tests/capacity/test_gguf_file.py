"""The reader that takes arrays whole gives what the library's own reader gives."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from kvtape.capacity.errors import ModelFileError
from kvtape.capacity.gguf_file import array_length, open_gguf
from support.sparse_gguf import write_sparse_gguf
from support.tiny_gguf import write_tiny

ARRAYS = {
    "a.bools": [True, False, True],
    "a.floats": [0.5, -1.25],
    "a.ints": [-3, 4, 2**31 - 1],
    "a.text": ["", "ä", "three words here"],
    "a.one": ["x"],
}


def odd_file(path: Path, endianess: gguf.GGUFEndian = gguf.GGUFEndian.LITTLE) -> Path:
    writer = gguf.GGUFWriter(path, "odd", endianess=endianess)
    for key, values in ARRAYS.items():
        writer.add_array(key, values)
    writer.add_key_value("a.narrow", [1, 2, 255], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT8)
    writer.add_key_value("a.wide", [2**63, 5], gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT64)
    writer.add_string("a.string", "plain")
    writer.add_tensor("w", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same_reading(path: Path) -> None:
    plain, ours = gguf.GGUFReader(str(path)), open_gguf(path)
    assert list(ours.fields) == list(plain.fields)
    for key, field in plain.fields.items():
        mine = ours.fields[key]
        assert (mine.contents(), mine.types, mine.offset) == (field.contents(), field.types, field.offset), key
        assert b"".join(p.tobytes() for p in mine.parts) == b"".join(p.tobytes() for p in field.parts), key
    assert (ours.data_offset, ours.alignment) == (plain.data_offset, plain.alignment)
    assert [(t.name, t.tensor_type, t.data_offset, t.n_bytes) for t in ours.tensors] == [
        (t.name, t.tensor_type, t.data_offset, t.n_bytes) for t in plain.tensors
    ]
    for mine_t, plain_t in zip(ours.tensors, plain.tensors, strict=True):
        assert np.array_equal(mine_t.data, plain_t.data)


@pytest.mark.parametrize("arch", ["llama", "gemma3", "lfm2", "mamba", "qwen2vl"])
def test_tiny_models_read_as_the_plain_reader_reads_them(tmp_path: Path, arch: str) -> None:
    assert_same_reading(write_tiny(tmp_path / "m.gguf", arch, weights="q8_0"))


@pytest.mark.parametrize("endianess", list(gguf.GGUFEndian))
def test_arrays_of_any_element_type_and_byte_order(tmp_path: Path, endianess: gguf.GGUFEndian) -> None:
    path = odd_file(tmp_path / "odd.gguf", endianess)
    assert_same_reading(path)
    fields = open_gguf(path).fields
    assert {key: fields[key].contents() for key in ARRAYS} == ARRAYS
    assert (fields["a.text"].contents(2), fields["a.text"].contents(slice(1))) == ("three words here", [""])
    assert array_length(fields["a.wide"]) == 2


def header(array_item: int, count: int, body: bytes) -> bytes:
    """A GGUF of one array and no tensors."""
    key = b"k"
    start = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    return start + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, array_item, count) + body


@pytest.mark.parametrize(
    ("item", "count", "body"),
    [
        (gguf.GGUFValueType.STRING, 2, struct.pack("<Q", 1) + b"x" + struct.pack("<Q", 2**60)),
        (gguf.GGUFValueType.STRING, 5, struct.pack("<Q", 1) + b"x"),
        (gguf.GGUFValueType.UINT32, 5, struct.pack("<I", 1)),
        (gguf.GGUFValueType.STRING, 2**62, b""),
        (gguf.GGUFValueType.UINT8, 2**63, b""),
        (77, 1, b"x"),
    ],
)
def test_damage_is_named_with_the_file_and_the_remedy(tmp_path: Path, item: int, count: int, body: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(header(item, count, body))
    with pytest.raises(ModelFileError, match=r"bad\.gguf: damaged GGUF .*copy or download it again"):
        open_gguf(path)


def test_a_file_cut_in_its_weights_is_refused(tmp_path: Path) -> None:
    path = write_tiny(tmp_path / "m.gguf", "llama")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelFileError, match="cut short"):
        open_gguf(path)


_PROBE = """
import sys
from pathlib import Path
from kvtape.capacity.gguf_file import open_gguf
reader = open_gguf(sys.argv[1])
# Not ru_maxrss, which a process inherits from the one that started it.
peak = next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(peak, len(reader.tensors))
"""


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the peak of memory is read from /proc")
def test_a_30_gb_file_costs_less_than_100_mb(tmp_path: Path) -> None:
    """Sparse weights of 30 GB behind a header with a vocabulary of 150,000 tokens; its time is a benchmark's."""
    path = write_sparse_gguf(tmp_path / "large.gguf", n_tensors=300, n_tokens=150_000)
    assert path.stat().st_size > 30 * 10**9
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, str(path)], capture_output=True, text=True, check=True, timeout=60
    )
    peak, tensors = done.stdout.split()
    assert int(tensors) == 300
    assert int(peak) < 100_000  # kB
