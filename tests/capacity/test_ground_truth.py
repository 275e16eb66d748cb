"""Sizes that real runs of llama.cpp printed, from the keys of their models, to the printed 0.01 MiB."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvtape.capacity.allocation import Allocation, CacheSettings
from kvtape.capacity.engines import Sizing
from kvtape.capacity.layers import model_kv
from kvtape.capacity.llama_rules import llama_rule
from kvtape.capacity.metadata import Metadata
from support.known_models import KNOWN_MODELS, keys_of

_DATA = Path(__file__).with_name("data") / "kv-sizes.tsv"

NOT_REPRODUCED = {
    "K59": "deepseek4 keeps compressed rows beside its window; its metadata keys are not documented",
    "K63": "a context of its own for the prediction layer; the keys describe the layers before it",
    "K68": "a fault of that build: values were allocated for the indexer (#28330)",
}

_PARTS = {"attention": "full", "indexer (fixed)": "indexer", "indexer (bug)": "indexer", "MTP draft": "full"}
_MONTHS = {"2023": 0, "2024": 0, "2025-03": 0, "2025-06": 5600, "2025-07": 5850, "2025-08": 6100, "2025-12": 7300}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    cells: dict[str, str]

    @property
    def id(self) -> str:
        return self.cells["id"]

    def number(self, column: str) -> int:
        return int(self.cells[column] or 0)

    @property
    def build(self) -> int | None:
        """The build that printed it: as stated, else one of its month; None for the newest, whose rule for latent rows
        the fork ik_llama.cpp had from the start.
        """
        when = self.cells["when"]
        if "(fork)" in self.cells["model"]:
            return None
        if when.startswith("b"):
            return int(when[1:])
        return _MONTHS.get(when, _MONTHS.get(when[:4]) if when[:4] < "2025" else None)

    def settings(self) -> CacheSettings:
        text = self.cells
        slots = self.number("n_seq_max")
        recurrent = text["part"] == "recurrent"
        return CacheSettings(
            slots=slots,
            unified=text["unified"] == "yes",
            n_ubatch=self.number("n_ubatch") or 512,
            flash_attention=text["flash_attn"] != "off",
            swa_full=text["swa_full"] == "yes",
            snapshots=self.number("cells") // slots - 1 if recurrent else 0,
        )


def rows() -> list[Row]:
    lines = [line for line in _DATA.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [Row(cells) for cells in csv.DictReader(lines, delimiter="\t")]


def allocated(row: Row) -> Allocation:
    model = model_kv(Metadata(keys_of(row.cells["model"]), row.id))
    geometry = model.geometry.stored_as(row.cells["type_k"], row.cells["type_v"])
    return Sizing(geometry, llama_rule(row.build), row.settings()).allocate(row.number("n_ctx_req") or 131072)


def is_reproduced(row: Row) -> bool:
    """Is there a cache with the printed layers, cells and streams, and the printed sizes?"""
    if row.cells["model"] not in KNOWN_MODELS:
        return False
    part = _PARTS.get(row.cells["part"], row.cells["part"])
    found = [p for p in allocated(row).parts if p.part == part or part.startswith("all ")]
    shape = {(p.cells, p.streams) for p in found}
    if shape != {(row.number("cells"), row.number("streams"))}:
        return False
    if sum(p.layers for p in found) != row.number("layers"):
        return False
    sizes = {
        "k_mib": sum(p.k_bytes for p in found),
        "v_mib": sum(p.v_bytes for p in found),
        "total_mib": sum(p.total_bytes for p in found),
    }
    printed = {column: row.cells[column] for column in sizes if row.cells[column]}
    return all(f"{sizes[column] / 2**20:.2f}" == text for column, text in printed.items())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.id)
def test_a_printed_size_is_reproduced_or_has_its_reason(row: Row) -> None:
    """A row that came to be reproduced must leave the list, and one that no longer is must not slip in."""
    assert is_reproduced(row) == (row.id not in NOT_REPRODUCED)


def test_every_row_whose_widths_come_from_metadata_is_tried() -> None:
    table = rows()
    assert len({row.id for row in table}) == len(table) == 59
    assert {row.id for row in table} >= set(NOT_REPRODUCED)
    by_metadata = [row for row in table if row.cells["widths_from"].startswith("metadata")]
    assert [row.id for row in by_metadata if row.id in NOT_REPRODUCED] == ["K63"]


@pytest.mark.parametrize("row", [r for r in rows() if r.cells["widths_from"] == "metadata"], ids=lambda r: r.id)
def test_a_wrong_row_would_be_seen(row: Row) -> None:
    wrong = Row({**row.cells, "total_mib": f"{float(row.cells['total_mib']) + 0.01:.2f}"})
    assert not is_reproduced(wrong)
