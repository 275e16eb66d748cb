"""The resident path over packed weights: the same bits as the plain path, for every engine that there is."""

from __future__ import annotations

from types import SimpleNamespace

import gguf
import numpy as np
import pytest

from kvtape.backends.reference.engines.engine import KvEngine
from kvtape.backends.reference.engines.registry import engine_entries
from kvtape.backends.reference.model.blas import Floats
from kvtape.backends.reference.model.dispatch import logits_of
from kvtape.backends.reference.model.matrix import Matrix
from kvtape.backends.reference.model.weights import Weights
from support.llama_tiny import model_file
from support.reference import play, text

# Every KV engine of the catalogue in a spec that exercises it. An engine that is added must be added here.
KV_SPECS = {
    "boundary-kv": "boundary-kv:chunk=20",
    "boundary-per-layer": "boundary-per-layer:window=24,codecs=bf16x1+q8_0",
    "markov-rs": "markov-rs:window=24",
    "markov-rs-codec": "markov-rs-codec:window=24",
    "no-cache": "no-cache",
    "standard": "standard:window=24",
    "turbo-quant": "tq3",
    "windowed-checkpoint": "windowed-checkpoint:window=24",
}
RETRIEVAL = {"apollo"}  # in test_apollo
CELLS = [(spec, storage) for spec in sorted(KV_SPECS.values()) for storage in ("f16", "q4_0", "q8_0")]


def test_the_matrix_counts_every_engine() -> None:
    """The matrix cannot shrink: an engine of the catalogue that is missing from it is an error."""
    names = {entry.name for entry in engine_entries()}
    assert names == set(KV_SPECS) | RETRIEVAL
    assert len(CELLS) == 3 * (len(names) - len(RETRIEVAL))


def _opened(storage: str, *, packed: bool) -> Weights:
    return Weights(model_file("llama", n_head=4, n_head_kv=2, head_dim=32, weights=storage), packed=packed)


@pytest.mark.parametrize(("spec", "storage"), CELLS)
def test_packed_is_plain_to_the_bit(spec: str, storage: str) -> None:
    plain, packed = _opened(storage, packed=False), _opened(storage, packed=True)
    runs = [play(spec, model, text(40), 8) for model in (plain, packed)]
    np.testing.assert_array_equal(runs[1].hidden, runs[0].hidden)
    assert runs[1].tokens == runs[0].tokens
    _same_rows(runs[0].engine, runs[1].engine)
    np.testing.assert_array_equal(_logits(packed, runs[1].hidden), _logits(plain, runs[0].hidden))


def _logits(model: Weights, hidden: Floats) -> Floats:
    return logits_of(model, hidden)


def _same_rows(one: KvEngine, other: KvEngine) -> None:
    for position in range(48):
        a, b = one.read_kv_row(0, position), other.read_kv_row(0, position)
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            np.testing.assert_array_equal(a[0], b[0])
            np.testing.assert_array_equal(a[1], b[1])


def test_the_packed_path_really_ran() -> None:
    """Every matrix is packed, every product unpacked its tiles, and nothing was kept."""
    packed = _opened("q8_0", packed=True)
    n_layer = packed.architecture.n_layer
    play("standard", packed, text(40), 3)
    report = packed.report()
    # Two embedding-sized matrices, and seven in each layer: q, k, v, out, gate, up, down.
    assert report.matrices == report.packed == 2 + 7 * n_layer
    assert report.path == "packed"
    assert report.resident_bytes == 0
    # One prefill and three steps through the layers, three choices through the head; each matrix is one tile here.
    assert report.tiles_unpacked == 4 * 7 * n_layer + 3


def test_the_plain_path_keeps_what_it_unpacked() -> None:
    plain = _opened("q8_0", packed=False)
    play("standard", plain, text(40), 3)
    report = plain.report()
    assert (report.path, report.packed, report.tiles_unpacked) == ("plain", 0, 0)
    sizes = [m.n_out * m.n_in for name, m in plain._matrices.items() if name != "token_embd.weight"]
    assert report.resident_bytes == 4 * sum(sizes)


def test_an_f32_file_is_used_where_it_is_mapped() -> None:
    model = Weights(model_file("llama"), packed=True)
    play("standard", model, text(10), 2)
    assert model.report().resident_bytes == model.report().packed == 0


def test_tiles_cut_a_matrix_into_equal_parts_once() -> None:
    rows = np.arange(20000, dtype=np.float32)[:, None] + np.zeros(64, np.float32)
    tensor = SimpleNamespace(
        name="head", data=rows, shape=(64, 20000), n_bytes=rows.nbytes, tensor_type=gguf.GGMLQuantizationType.F32
    )
    starts, tiles = zip(*Matrix(tensor, np.dtype(np.float32), packed=False).tiles(), strict=True)
    np.testing.assert_array_equal(np.concatenate(tiles), rows)
    assert starts == tuple(range(0, 20000, len(tiles[0])))
    assert len(tiles) == 2
    assert all(tile.nbytes <= 4 * 2**20 + 64 * 64 * 4 for tile in tiles)
